"""The layer under all three images: a minimal Debian root file system, made once by mmdebstrap and kept in the cache.

The suite is that of the Python that the engine environment was made with: pods run the host's virtual environment with
this layer's interpreter.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from e2e.cluster.packages import IMAGE_PACKAGES, apply_packages
from e2e.cluster.paths import Paths
from e2e.cluster.progress import run_logged
from e2e.images.oci import Layer, find_architecture, observe_layer

SUITE: Final = "bookworm"
PYTHON_VERSION: Final = "3.11"
"""Of ``SUITE``; bytecode and wheels in the upper layers are for it."""
PACKAGES: Final = (
    "ca-certificates",
    "libgomp1",  # torch
    "libnuma1",  # vLLM on CPU
    "libstdc++6",
    "procps",
    "python3",
)
LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
BUILD_LIMIT_SECONDS: Final = 1200.0


def compute_base_key() -> str:
    """12 hexadecimal digits over what is asked of mmdebstrap.

    Debian's updates are not in it: remove the file to have them.
    """
    return hashlib.sha256(repr((SUITE, PACKAGES, LEFT_OUT, find_architecture())).encode()).hexdigest()[:12]


def apply_base(paths: Paths) -> Layer:
    """The base layer, made when the cache lacks it (half a minute)."""
    target = paths.images / f"base-{compute_base_key()}.tar"
    if not target.exists():
        apply_packages(IMAGE_PACKAGES, paths.logs)
        paths.images.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"partial-{target.name}")
        partial.unlink(missing_ok=True)
        run_logged(
            [
                "mmdebstrap",
                "--variant=minbase",
                f"--include={','.join(PACKAGES)}",
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
                SUITE,
                str(partial),
            ],
            what="Making the images' Debian base",
            log=paths.logs / "mmdebstrap.log",
            limit_seconds=BUILD_LIMIT_SECONDS,
            environment={**os.environ, "SOURCE_DATE_EPOCH": "0"},
        )
        partial.rename(target)
    return observe_layer(target)
