"""Install the engine environment (vLLM and NIXL on CPU) and make the models, all cached outside the tree.

``python -m e2e.engine.provision`` is idempotent: outputs are keyed by the content of their inputs and marked complete
as the last step, so an interrupted run starts over and a second run takes no time. Stable links in ``LINKS`` lead to
the current ones; the demo's resource and the tests name only the links.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from e2e.cluster.paths import Paths, find_paths
from e2e.cluster.progress import ClusterError, run_logged, say
from e2e.cluster.toolchain import find_uv

HERE: Final = Path(__file__).parent
REQUIREMENTS: Final = HERE / "requirements.txt"
MODEL_SCRIPT: Final = HERE / "model.py"
LINKS: Final = Path("/var/lib/bidikv")
ENGINE_LINK: Final = LINKS / "engine"
MODEL_LINK: Final = LINKS / "model"
"""The demo's model."""
TINY_LINK: Final = LINKS / "tiny"
"""A model of two layers, for tests with many engines."""
MLA_LINK: Final = LINKS / "mla"
"""The same with multi-head latent attention."""
SYSTEM_PYTHON: Final = "/usr/bin/python3"
"""Debian's interpreter, at the same path on the host and in the images: pods mount the environment as it is."""
PATCH_NAME: Final = "bidikv_local_engine.pth"
PATCH: Final = "import functools, os, time; os.sched_yield = functools.partial(time.sleep, 1e-4)\n"
"""vLLM's shared-memory queue spins on sched_yield: on two cores, spinning engines starve everything for minutes."""
INSTALL_LIMIT_SECONDS: Final = 1800.0
COMPLETE: Final = ".complete"


def key_of(*parts: bytes) -> str:
    """Short content key of a build output."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def point(link: Path, target: Path) -> None:
    """Atomically make ``link`` lead to ``target``."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(link)


def provision_engine(paths: Paths) -> Path:
    """The environment with vLLM; returns its folder.

    Raises:
        ClusterError: the interpreter or uv is missing, or the installation failed.
    """
    if sys.version_info[:2] != (3, 11):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ClusterError(f"the engine environment needs CPython 3.11 at {SYSTEM_PYTHON} (Debian 12), found {version}")
    uv = find_uv(paths)
    if uv is None:
        raise ClusterError("uv was not found: run `make setup`, which installs it")
    target = paths.cache / "engine" / key_of(REQUIREMENTS.read_bytes(), PATCH.encode(), sys.version.encode())
    if not (target / COMPLETE).exists():
        shutil.rmtree(target, ignore_errors=True)
        python = target / "bin" / "python"
        log = paths.logs / "engine.log"
        run_logged(
            [uv, "venv", "--python", SYSTEM_PYTHON, str(target)],
            what="Making the engine environment",
            log=log,
            limit_seconds=INSTALL_LIMIT_SECONDS,
        )
        # Bytecode now: the environment is mounted read-only into pods, which could not keep what they compile.
        options = ("--no-deps", "--compile-bytecode", "-r", str(REQUIREMENTS))
        run_logged(
            [uv, "pip", "install", "--python", str(python), *options],
            what="Installing vLLM and NIXL for CPU (6 GB)",
            log=log,
            limit_seconds=INSTALL_LIMIT_SECONDS,
        )
        (target / "lib" / "python3.11" / "site-packages" / PATCH_NAME).write_text(PATCH)
        (target / COMPLETE).touch()
    point(ENGINE_LINK, target)
    return target


def provision_model(paths: Paths, engine: Path, shape: str = "demo") -> Path:
    """A model of one of the shapes of ``model.py``; returns its folder.

    Raises:
        ClusterError: it could not be made.
    """
    target = paths.cache / shape / key_of(MODEL_SCRIPT.read_bytes(), REQUIREMENTS.read_bytes())
    if not (target / COMPLETE).exists():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        run_logged(
            [str(engine / "bin" / "python"), str(MODEL_SCRIPT), str(target), shape],
            what=f"Making the {shape} random-weight model",
            log=paths.logs / f"model-{shape}.log",
            limit_seconds=INSTALL_LIMIT_SECONDS,
            environment=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        (target / COMPLETE).touch()
    point(MODEL_LINK if shape == "demo" else LINKS / shape, target)
    return target


def main() -> None:
    paths = find_paths()
    try:
        engine = provision_engine(paths)
        provision_model(paths, engine)
        for shape in ("tiny", "mla"):
            provision_model(paths, engine, shape)
    except ClusterError as error:
        raise SystemExit(str(error)) from None
    say(f"Engine environment {ENGINE_LINK}, models {MODEL_LINK}, {TINY_LINK} and {MLA_LINK}.")


if __name__ == "__main__":
    main()
