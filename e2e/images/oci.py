"""OCI images from plain files: deterministic layers, manifests, and an archive that containerd imports.

Equal content gives equal bytes everywhere: entries are sorted, owned by root and dated 0, and the documents are written
with sorted keys. So an image's tag can be the hash of its content. Format: OCI image specification 1.0.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE: Final = "application/vnd.oci.image.layer.v1.tar"
NAME_ANNOTATION: Final = "io.containerd.image.name"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
TAG_LENGTH: Final = 12


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer: a tar file, the SHA-256 of its bytes (64 hexadecimal digits) and its size in bytes."""

    path: Path
    digest: str
    size: int


@dataclass(frozen=True)
class Image:
    """What a container starts from."""

    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    folder: str = "/"


@dataclass(frozen=True)
class Documents:
    """The two documents of an image, byte for byte."""

    config: bytes
    manifest: bytes

    @property
    def tag(self) -> str:
        """The first digits of the manifest's hash: it covers the configuration and every layer."""
        return hashlib.sha256(self.manifest).hexdigest()[:TAG_LENGTH]


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def find_architecture() -> str:
    """This machine's architecture as OCI names it."""
    machine = platform.machine()
    return ARCHITECTURES.get(machine, machine)


def build_documents(image: Image, architecture: str) -> Documents:
    """Configuration and manifest of an image."""
    config = _encode(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {
                "Entrypoint": list(image.entrypoint),
                "Env": [f"{key}={value}" for key, value in sorted(image.environment.items())],
                "User": image.user,
                "WorkingDir": image.folder,
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in image.layers]},
        }
    )
    manifest = _encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(CONFIG_TYPE, config),
            "layers": [
                {"mediaType": LAYER_TYPE, "digest": f"sha256:{layer.digest}", "size": layer.size}
                for layer in image.layers
            ],
        }
    )
    return Documents(config, manifest)


def observe_layer(path: Path) -> Layer:
    """Digest and size of a tar file on disk."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Layer(path, digest, path.stat().st_size)


def write_layer(target: Path, folders: Mapping[str, Path]) -> Layer:
    """Write a layer that holds each folder of this machine at the given place of the image (no leading ``/``).

    Modes keep only their permission bits; owner, group and times are not taken over.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
        parents: set[str] = set()
        for place, folder in sorted(folders.items()):
            parts = place.strip("/").split("/")
            for depth in range(1, len(parts) + 1):
                parent = "/".join(parts[:depth])
                if parent not in parents:
                    parents.add(parent)
                    archive.addfile(_entry(parent, tarfile.DIRTYPE, 0o755))
            for path in sorted(folder.rglob("*")):
                _add(archive, path, f"{'/'.join(parts)}/{path.relative_to(folder).as_posix()}")
    partial.replace(target)
    return observe_layer(target)


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.mode = mode
    return entry


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        link = _entry(name, tarfile.SYMTYPE, 0o777)
        link.linkname = os.readlink(path)
        archive.addfile(link)
    elif stat.S_ISDIR(status.st_mode):
        archive.addfile(_entry(name, tarfile.DIRTYPE, mode))
    elif stat.S_ISREG(status.st_mode):
        file = _entry(name, tarfile.REGTYPE, mode)
        file.size = status.st_size
        with path.open("rb") as content:
            archive.addfile(file, content)
    else:
        raise ValueError(f"{path} is neither a file, a folder nor a symbolic link: a layer cannot hold it")


def write_archive(
    output: IO[bytes],
    images: Sequence[tuple[Sequence[str], Image]],
    architecture: str,
    known_digests: Collection[str] = (),
) -> None:
    """Write an OCI image layout as one tar stream: each image under each of its names.

    A layer is written once, however many images share it, and not at all when ``known_digests`` has it: then the
    receiver must hold it already.
    """
    blobs: dict[str, Layer | bytes] = {}
    manifests: list[dict[str, Any]] = []
    for names, image in images:
        documents = build_documents(image, architecture)
        for content in (documents.config, documents.manifest):
            blobs[hashlib.sha256(content).hexdigest()] = content
        blobs.update({layer.digest: layer for layer in image.layers if layer.digest not in known_digests})
        for name in names:
            annotations = {NAME_ANNOTATION: name, "org.opencontainers.image.ref.name": name}
            manifests.append({**_descriptor(MANIFEST_TYPE, documents.manifest), "annotations": annotations})
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add_bytes(archive, "oci-layout", _encode({"imageLayoutVersion": "1.0.0"}))
        for digest, blob in sorted(blobs.items()):
            if isinstance(blob, bytes):
                _add_bytes(archive, f"blobs/sha256/{digest}", blob)
            else:
                entry = _entry(f"blobs/sha256/{digest}", tarfile.REGTYPE, 0o644)
                entry.size = blob.size
                with blob.path.open("rb") as file:
                    archive.addfile(entry, file)
        _add_bytes(archive, "index.json", _encode({"schemaVersion": 2, "manifests": manifests}))


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = _entry(name, tarfile.REGTYPE, 0o644)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
