"""The Python layers: an extra's third-party distributions (changed seldom), and the project's own packages (often).

Both lie at ``LIBRARY`` of the image. Bytecode is compiled in with unchecked hashes: it depends on no file time, and a
pod with a read-only root starts without compiling.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from e2e.cluster.paths import Paths
from e2e.cluster.progress import ClusterError, run_logged
from e2e.cluster.toolchain import find_uv
from e2e.images.base import PYTHON_VERSION
from e2e.images.oci import Layer, find_architecture, observe_layer, write_layer

CHECKOUT: Final = Path(__file__).parents[2]
LIBRARY: Final = "opt/bidikv/lib"
DIST_PACKAGES: Final = f"usr/local/lib/python{PYTHON_VERSION}/dist-packages"
"""Debian's Python looks here whatever PYTHONPATH says."""
SIMULATED_ENGINE: Final = ("httptools", "msgspec", "prometheus-client", "pyzmq", "uvicorn", "uvloop")
"""What ``e2e.simengine`` imports of others."""
SOURCES: Final = ("operator/bidikv_operator", "runtime/bidikv_runtime", "crds")
METADATA: Final = ("pyproject.toml", "README.md", "LICENSE")
CONSTRAINTS: Final = CHECKOUT / "constraints.txt"
FORMAT: Final = "1"
"""Raised when layers are made in another way from the same inputs."""
LIMIT_SECONDS: Final = 600.0


def parse_extra(project: str, extra: str) -> list[str]:
    """Requirements of an extra in the text of a pyproject.toml; ``KeyError`` when it has none of that name."""
    requirements = tomllib.loads(project)["project"]["optional-dependencies"][extra]
    return [str(requirement) for requirement in requirements]


def compute_key(parts: Iterable[bytes]) -> str:
    """12 hexadecimal digits over the parts, their lengths, and the Python and machine that the layers are for."""
    digest = hashlib.sha256(f"{FORMAT} {PYTHON_VERSION} {find_architecture()}".encode())
    for part in parts:
        digest.update(f"\n{len(part)}\n".encode())
        digest.update(part)
    return digest.hexdigest()[:12]


def find_sources(checkout: Path = CHECKOUT) -> list[Path]:
    """The files of the project that end up in a wheel, sorted."""
    files = [checkout / name for name in METADATA]
    for folder in SOURCES:
        files += [
            path
            for path in (checkout / folder).rglob("*")
            if path.is_file() and not {"tests", "__pycache__"} & set(path.relative_to(checkout).parts)
        ]
    return sorted(files)


def apply_dependencies(paths: Paths, *extras: str, distributions: Sequence[str] = ()) -> Layer:
    """The layer with the extras' third-party distributions and some by name, pinned by constraints.txt."""
    project = (CHECKOUT / "pyproject.toml").read_text()
    requirements = [requirement for extra in extras for requirement in parse_extra(project, extra)]
    requirements += distributions
    name = "-".join((*extras, *distributions))
    key = compute_key([*(requirement.encode() for requirement in requirements), CONSTRAINTS.read_bytes()])
    target = paths.images / f"{name}-dependencies-{key}.tar"
    if target.exists():
        return observe_layer(target)
    with tempfile.TemporaryDirectory(prefix="bidikv-layer-") as parent:
        folder = Path(parent, "lib")
        run_logged(
            [
                _require_uv(paths),
                "pip",
                "install",
                f"--target={folder}",
                f"--python-version={PYTHON_VERSION}",
                "--no-build",
                f"--constraints={CONSTRAINTS}",
                *requirements,
            ],
            what=f"Installing the distributions of {' and '.join(extras) or 'the simulated engine'}",
            log=paths.logs / f"image-{name}.log",
            limit_seconds=LIMIT_SECONDS,
        )
        shutil.rmtree(folder / "bin", ignore_errors=True)  # scripts that name this machine's interpreter
        _write_bytecode(folder)
        return write_layer(target, {LIBRARY: folder})


def apply_packages_layer(paths: Paths, packages: tuple[str, ...]) -> Layer:
    """The layer with these packages of the project, out of its wheel."""
    sources = find_sources()
    key = compute_key([*(name.encode() for name in packages), *_read_all(sources)])
    target = paths.images / f"{'-'.join(packages)}-{key}.tar"
    if target.exists():
        return observe_layer(target)
    wheel = _apply_wheel(paths, compute_key(_read_all(sources)))
    with tempfile.TemporaryDirectory(prefix="bidikv-layer-") as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                top = entry.split("/")[0]
                # RECORD lists every file of the wheel: with it, a change of a package left out would change this layer.
                if top in packages or (top.endswith(".dist-info") and not entry.endswith("/RECORD")):
                    archive.extract(entry, folder)
        _write_bytecode(folder)
        return write_layer(target, {LIBRARY: folder})


def find_simulated_engine(checkout: Path = CHECKOUT) -> list[Path]:
    """The files of ``e2e.simengine`` without its tests, sorted."""
    folder = checkout / "e2e" / "simengine"
    files = [path for path in folder.rglob("*.py") if "tests" not in path.relative_to(folder).parts]
    return sorted([checkout / "e2e" / "__init__.py", *files])


def apply_simulated_engine_layer(paths: Paths) -> Layer:
    """The layer with ``e2e.simengine`` and the ``vllm`` that is it.

    The operator gives engines a PYTHONPATH of its own; a ``.pth`` file leads to ``LIBRARY`` all the same.
    """
    files = find_simulated_engine()
    target = paths.images / f"simulated-engine-{compute_key(_read_all(files))}.tar"
    if target.exists():
        return observe_layer(target)
    with tempfile.TemporaryDirectory(prefix="bidikv-layer-") as name:
        library, site = Path(name, "lib"), Path(name, "site")
        for file in files:
            place = library / file.relative_to(CHECKOUT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
        (library / "e2e" / "simengine" / "as_vllm" / "vllm").rename(library / "vllm")
        site.mkdir()
        (site / "bidikv.pth").write_text(f"/{LIBRARY}\n")
        _write_bytecode(library)
        return write_layer(target, {LIBRARY: library, DIST_PACKAGES: site})


def _read_all(files: Iterable[Path]) -> Iterable[bytes]:
    for file in files:
        yield file.relative_to(CHECKOUT).as_posix().encode()
        yield file.read_bytes()


def _apply_wheel(paths: Paths, key: str) -> Path:
    folder = paths.images / f"wheel-{key}"
    if not folder.exists():
        paths.images.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".wheel-", dir=paths.images) as name:
            run_logged(
                [_require_uv(paths), "build", "--wheel", f"--out-dir={name}/wheel", str(CHECKOUT)],
                what="Building the project's wheel",
                log=paths.logs / "wheel.log",
                limit_seconds=LIMIT_SECONDS,
            )
            Path(name, "wheel").rename(folder)
    return next(folder.glob("*.whl"))


def _require_uv(paths: Paths) -> str:
    uv = find_uv(paths)
    if uv is None:
        raise ClusterError("uv was not found: run `make setup`, which installs it")
    return uv


def _write_bytecode(folder: Path) -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != PYTHON_VERSION:
        raise ClusterError(f"the images' Python is {PYTHON_VERSION} and this one {running}: run `make setup`")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode=unchecked-hash",
            "-s",
            str(folder),
            "-p",
            f"/{LIBRARY}",
            str(folder),
        ],
        check=True,
        timeout=LIMIT_SECONDS,
    )
