"""Install the engine environment (vLLM and NIXL on CPU) and make the demo's model, both cached outside the tree.

``python -m e2e.engine.provision`` is idempotent: outputs are keyed by the content of their inputs and marked complete
as the last step, so an interrupted run starts over and a second run takes no time. Stable links in ``LINKS`` lead to
the current ones; the demo's resource and the tests name only the links.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
MODEL_SCRIPT = HERE / "model.py"
LINKS = Path("/var/lib/bidikv")
ENGINE_LINK = LINKS / "engine"
MODEL_LINK = LINKS / "model"
SYSTEM_PYTHON = "/usr/bin/python3"
"""Debian's interpreter, at the same path on the host and in the images: pods mount the environment as it is."""
PATCH_NAME = "bidikv_local_engine.pth"
PATCH = "import functools, os, time; os.sched_yield = functools.partial(time.sleep, 1e-4)\n"
"""vLLM's shared-memory queue spins on sched_yield: on two cores, spinning engines starve everything for minutes."""


def cache_directory() -> Path:
    """Where build outputs live: ``BIDIKV_CACHE``, else ``~/.cache/bidikv``."""
    return Path(os.environ.get("BIDIKV_CACHE") or Path.home() / ".cache" / "bidikv")


def key_of(*parts: bytes) -> str:
    """Short content key of a build output."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def progress(text: str) -> None:
    print(f"[engine] {text}", flush=True)


def run(argv: list[str], **environment: str) -> None:
    """Run a step, its output shown only when it fails.

    Raises:
        SystemExit: the step failed or passed its deadline; the message holds its last lines.
    """
    try:
        done = subprocess.run(
            argv,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{argv[0]} took over 30 minutes: check the network and run again") from None
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:4])} ... failed:\n" + "\n".join(done.stdout.splitlines()[-20:]))


def point(link: Path, target: Path) -> None:
    """Atomically make ``link`` lead to ``target``."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(link)


def provision_engine(uv: str) -> Path:
    """The environment with vLLM; returns its folder."""
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(
            "the engine environment needs CPython 3.11 at /usr/bin/python3 (Debian 12), "
            f"found {sys.version_info.major}.{sys.version_info.minor}"
        )
    target = cache_directory() / "engine" / key_of(REQUIREMENTS.read_bytes(), PATCH.encode(), sys.version.encode())
    complete = target / ".complete"
    if not complete.exists():
        started = time.monotonic()
        progress("installing vLLM and NIXL for CPU (about 6 GB, 1 to 5 minutes) ...")
        shutil.rmtree(target, ignore_errors=True)
        run([uv, "venv", "--python", SYSTEM_PYTHON, str(target)])
        python = target / "bin" / "python"
        # Bytecode now: the environment is mounted read-only into pods, which could not keep what they compile.
        run([uv, "pip", "install", "--python", str(python), "--no-deps", "--compile-bytecode", "-r", str(REQUIREMENTS)])
        site_packages = target / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site_packages / PATCH_NAME).write_text(PATCH)
        complete.touch()
        progress(f"engine environment ready after {time.monotonic() - started:.0f} s")
    point(ENGINE_LINK, target)
    return target


def provision_model(engine: Path) -> Path:
    """The demo's model; returns its folder."""
    target = cache_directory() / "model" / key_of(MODEL_SCRIPT.read_bytes(), REQUIREMENTS.read_bytes())
    complete = target / ".complete"
    if not complete.exists():
        progress("making the demo's random-weight model ...")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        run([str(engine / "bin" / "python"), str(MODEL_SCRIPT), str(target)], HF_HUB_OFFLINE="1")
        complete.touch()
    point(MODEL_LINK, target)
    return target


def main() -> None:
    uv = shutil.which("uv") or str(cache_directory() / "tools" / "bin" / "uv")
    if not Path(uv).exists():
        raise SystemExit("uv is missing: run `make setup` first")
    engine = provision_engine(uv)
    provision_model(engine)
    progress(f"engine {ENGINE_LINK}, model {MODEL_LINK}")


if __name__ == "__main__":
    main()
