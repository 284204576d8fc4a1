"""The images of the local cluster, from their layers. Pure.

Other clusters take ordinary builds of the Containerfiles in operator/ and runtime/; these need no image builder.
"""

from __future__ import annotations

from typing import Final

from e2e.images.oci import Image, Layer, build_documents
from e2e.images.python_layers import LIBRARY

REPOSITORY: Final = "docker.io/bidikv"
"""containerd's full spelling: a name without a registry is rewritten to it, so nothing else would be found."""
ENGINE_FOLDER: Final = "/opt/bidikv/engine"
"""Where pods mount the engine's virtual environment from the host."""
ENGINE_STABLE_NAME: Final = f"{REPOSITORY}/engine:local"
SIMULATED_ENGINE_STABLE_NAME: Final = f"{REPOSITORY}/simengine:local"
STABLE_NAMES: Final = {"engine": ENGINE_STABLE_NAME, "simengine": SIMULATED_ENGINE_STABLE_NAME}
"""For documents that cannot know a hash."""
NON_ROOT: Final = "65532:65532"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON_ENVIRONMENT: Final = {
    "PATH": SYSTEM_PATH,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": f"/{LIBRARY}",
    "PYTHONUNBUFFERED": "1",
}


def build_operator_image(base: Layer, dependencies: Layer, packages: Layer) -> Image:
    """The operator, as user 65532."""
    return Image((base, dependencies, packages), ("python3", "-m", "bidikv_operator"), PYTHON_ENVIRONMENT, NON_ROOT)


def build_runtime_image(base: Layer, dependencies: Layer, packages: Layer) -> Image:
    """The router; the connector's installer with another command. As user 65532."""
    return Image(
        (base, dependencies, packages), ("python3", "-m", "bidikv_runtime.router"), PYTHON_ENVIRONMENT, NON_ROOT
    )


def build_engine_image(base: Layer) -> Image:
    """What surrounds vLLM, whose environment of several gigabytes is mounted at ``ENGINE_FOLDER``."""
    return Image((base,), environment={"PATH": f"{ENGINE_FOLDER}/bin:{SYSTEM_PATH}"})


def build_simulated_engine_image(base: Layer, dependencies: Layer, packages: Layer, engine: Layer) -> Image:
    """What stands for vLLM: the operator's command line starts ``e2e.simengine`` in it. As user 65532."""
    entrypoint = ("python3", "-m", "vllm.entrypoints.openai.api_server")
    environment = {name: value for name, value in PYTHON_ENVIRONMENT.items() if name != "PYTHONPATH"}
    return Image((base, dependencies, packages, engine), entrypoint, environment, NON_ROOT)


def build_references(images: dict[str, Image], architecture: str) -> dict[str, str]:
    """Name -> reference by content hash."""
    return {name: f"{REPOSITORY}/{name}:{build_documents(image, architecture).tag}" for name, image in images.items()}
