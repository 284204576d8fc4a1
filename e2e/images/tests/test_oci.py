from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from e2e.images.oci import Image, build_documents, observe_layer, write_archive, write_layer


def make_tree(folder: Path, content: str = "print()\n", time: int = 1_700_000_000) -> Path:
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "b.py").write_text(content)
    (folder / "package" / "a.py").write_text("")
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("run")
    for path in folder.rglob("*"):
        os.utime(path, (time, time), follow_symlinks=False)
    return folder


def test_equal_content_gives_equal_layers(tmp_path: Path) -> None:
    one = write_layer(tmp_path / "1.tar", {"opt/lib": make_tree(tmp_path / "x")})
    two = write_layer(tmp_path / "2.tar", {"opt/lib": make_tree(tmp_path / "y", time=1_600_000_000)})
    other = write_layer(tmp_path / "3.tar", {"opt/lib": make_tree(tmp_path / "z", content="print(1)\n")})
    assert one.digest == two.digest
    assert one.path.read_bytes() == two.path.read_bytes()
    assert other.digest != one.digest


def test_layer_holds_parents_modes_and_links(tmp_path: Path) -> None:
    layer = write_layer(tmp_path / "layer.tar", {"opt/lib": make_tree(tmp_path / "x")})
    with tarfile.open(layer.path) as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
    assert list(entries) == [
        "opt",
        "opt/lib",
        "opt/lib/link",
        "opt/lib/package",
        "opt/lib/package/a.py",
        "opt/lib/package/b.py",
        "opt/lib/run",
    ]
    assert entries["opt/lib/run"].mode == 0o755
    assert entries["opt/lib/link"].linkname == "run"
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries.values()} == {(0, 0, 0)}


def test_sockets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "x" / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file, a folder nor a symbolic link"):
        write_layer(tmp_path / "layer.tar", {"opt": tmp_path / "x"})


@pytest.fixture
def image(tmp_path: Path) -> Image:
    base = write_layer(tmp_path / "base.tar", {"usr": make_tree(tmp_path / "base")})
    top = write_layer(tmp_path / "top.tar", {"opt": make_tree(tmp_path / "top", content="top")})
    return Image((base, top), entrypoint=("python3", "-m", "x"), environment={"B": "2", "A": "1"}, user="65532:65532")


def test_documents_refer_to_each_other(image: Image) -> None:
    documents = build_documents(image, "amd64")
    config, manifest = json.loads(documents.config), json.loads(documents.manifest)
    assert manifest["config"]["digest"] == f"sha256:{hashlib.sha256(documents.config).hexdigest()}"
    assert manifest["config"]["size"] == len(documents.config)
    assert [layer["digest"] for layer in manifest["layers"]] == config["rootfs"]["diff_ids"]
    assert [layer["size"] for layer in manifest["layers"]] == [layer.path.stat().st_size for layer in image.layers]
    assert config["config"] == {
        "Entrypoint": ["python3", "-m", "x"],
        "Env": ["A=1", "B=2"],
        "User": "65532:65532",
        "WorkingDir": "/",
    }


def test_the_tag_follows_everything(image: Image) -> None:
    tags = {
        build_documents(changed, architecture).tag
        for changed, architecture in [
            (image, "amd64"),
            (image, "arm64"),
            (Image(image.layers[:1], image.entrypoint, image.environment, image.user), "amd64"),
            (Image(image.layers, ("python3",), image.environment, image.user), "amd64"),
            (Image(image.layers, image.entrypoint, {"A": "1"}, image.user), "amd64"),
            (Image(image.layers, image.entrypoint, image.environment, "0"), "amd64"),
        ]
    }
    assert len(tags) == 6
    assert all(len(tag) == 12 for tag in tags)


def read_archive(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_archive_is_an_image_layout(image: Image) -> None:
    output = io.BytesIO()
    lone = Image(image.layers[:1])
    write_archive(output, [(("r/a:1",), image), (("r/b:1", "r/b:local"), lone)], "amd64")
    files = read_archive(output.getvalue())
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(files["index.json"])["manifests"]
    assert [entry["annotations"]["io.containerd.image.name"] for entry in index] == ["r/a:1", "r/b:1", "r/b:local"]
    blobs = {name.removeprefix("blobs/sha256/"): body for name, body in files.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(body).hexdigest() == digest for digest, body in blobs.items())
    assert len(blobs) == 2 + 4  # two layers, one of them shared; two images of two documents
    for entry in index:
        manifest = json.loads(blobs[entry["digest"].removeprefix("sha256:")])
        assert {layer["digest"].removeprefix("sha256:") for layer in manifest["layers"]} <= set(blobs)


def test_layers_that_the_receiver_has_are_left_out(image: Image) -> None:
    output = io.BytesIO()
    write_archive(output, [(("r/a:1",), image)], "amd64", known_digests={image.layers[0].digest})
    files = read_archive(output.getvalue())
    assert f"blobs/sha256/{image.layers[0].digest}" not in files
    assert f"blobs/sha256/{image.layers[1].digest}" in files


def test_observed_layer_is_the_written_one(image: Image) -> None:
    assert observe_layer(image.layers[0].path) == image.layers[0]
