"""Build the mock engine and the load from ``c/`` and keep them by the hash of their sources, and install the peers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster.packages import apply_packages
from e2e.cluster.paths import Paths
from e2e.cluster.progress import ClusterError, run_logged
from e2e.cluster.toolchain import find_uv

HERE: Final = Path(__file__).parent
SOURCES: Final = HERE / "c"
REQUIREMENTS: Final = HERE / "requirements.txt"
FLAGS: Final = ("-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wno-sign-conversion")
COMPILER_PACKAGES: Final = ("gcc", "libc6-dev")
BUILD_LIMIT_SECONDS: Final = 300.0
INSTALL_LIMIT_SECONDS: Final = 900.0
SYSTEM_PYTHON: Final = "/usr/bin/python3"
COMPLETE: Final = ".complete"


@dataclass(frozen=True)
class Tools:
    """Paths of the programs."""

    mock: Path
    load: Path


def apply_tools(paths: Paths) -> Tools:
    """The programs, built if the cache lacks them.

    Raises:
        ClusterError: there is no compiler and none can be installed, or the build failed.
    """
    if shutil.which("gcc") is None:
        apply_packages(COMPILER_PACKAGES, paths.logs)
    version = subprocess.run(["gcc", "--version"], capture_output=True, check=True, timeout=60).stdout
    digest = hashlib.sha256(repr((FLAGS, version)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    key = digest.hexdigest()[:16]
    return Tools(mock=_build("mock", key, paths), load=_build("load", key, paths))


def _build(name: str, key: str, paths: Paths) -> Path:
    target = paths.binaries / f"bench-{name}-{key}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        run_logged(
            ["gcc", *FLAGS, str(SOURCES / "http.c"), str(SOURCES / f"{name}.c"), "-o", str(partial)],
            what=f"Building the bench's {name}",
            log=paths.logs / f"build-bench-{name}.log",
            limit_seconds=BUILD_LIMIT_SECONDS,
        )
        partial.rename(target)
    return target


def apply_peers(paths: Paths) -> Path:
    """The environment of the peers, installed if the cache lacks it; returns its folder.

    Raises:
        ClusterError: uv is missing, or the installation failed.
    """
    uv = find_uv(paths)
    if uv is None:
        raise ClusterError("uv was not found: run `make setup`, which installs it")
    target = paths.cache / "router-peers" / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    if not (target / COMPLETE).exists():
        shutil.rmtree(target, ignore_errors=True)
        log = paths.logs / "router-peers.log"
        run_logged(
            [uv, "venv", "--python", SYSTEM_PYTHON, str(target)],
            what="Making the peers' environment",
            log=log,
            limit_seconds=INSTALL_LIMIT_SECONDS,
        )
        python = str(target / "bin" / "python")
        run_logged(
            [uv, "pip", "install", "--python", python, "--no-deps", "-r", str(REQUIREMENTS)],
            what="Installing vllm-router and the toy proxy's libraries",
            log=log,
            limit_seconds=INSTALL_LIMIT_SECONDS,
        )
        (target / COMPLETE).touch()
    return target


def read_peer_version(requirements: Path = REQUIREMENTS) -> str:
    """``name==version`` of vllm-router."""
    return next(line for line in requirements.read_text().splitlines() if line.startswith("vllm-router=="))
