"""Images into a node's containerd, by its own client over the node's own socket."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from e2e.cluster.progress import ClusterError
from e2e.images.oci import Image, find_architecture, write_archive

NAMESPACE: Final = "k8s.io"
IMPORT_LIMIT_SECONDS: Final = 300.0


def find_snapshotter(folder: Path) -> str:
    """``overlayfs``, or ``native`` (copies) where the folder itself lies on an overlay: it cannot hold another one."""
    kind = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    return "native" if kind == "overlayfs" else "overlayfs"


def _ctr(socket: Path, *arguments: str) -> list[str]:
    return ["ctr", "--address", str(socket), "--namespace", NAMESPACE, *arguments]


def _observe(socket: Path, *arguments: str) -> set[str]:
    result = subprocess.run(_ctr(socket, *arguments), capture_output=True, text=True, check=False, timeout=60)
    if result.returncode != 0:
        raise ClusterError(f"containerd at {socket} does not answer ({result.stderr.strip()}); run `make cluster-up`")
    return set(result.stdout.split())


def apply_images(socket: Path, images: Sequence[tuple[Sequence[str], Image]]) -> list[str]:
    """Import the images whose names the node lacks, and of those only the layers that it lacks; the new names.

    A name that is not a hash of its content (``:local``) is imported again each time: it may point at something older.
    """
    present = _observe(socket, "images", "list", "--quiet")
    wanted = [
        (names, image)
        for names, image in images
        if any(name not in present or name.endswith(":local") for name in names)
    ]
    if not wanted:
        return []
    known = {digest.removeprefix("sha256:") for digest in _observe(socket, "content", "list", "--quiet")}
    snapshotter = find_snapshotter(socket.parent)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            _ctr(socket, "images", "import", "--snapshotter", snapshotter, "-"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            assert process.stdin is not None
            try:
                write_archive(process.stdin, wanted, find_architecture(), known)
                process.stdin.close()
            except BrokenPipeError:
                pass  # the importer's own message follows
            code = process.wait(IMPORT_LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        if code != 0:
            raise ClusterError(
                f"importing images over {socket} failed: {errors.read().decode(errors='replace').strip()}"
            )
    return [name for names, _ in wanted for name in names if name not in present]
