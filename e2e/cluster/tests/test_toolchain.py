from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster.toolchain import (
    COREDNS,
    HELM,
    KUBE,
    KUBERNETES_VERSION,
    PAUSE,
    SOURCES,
    Program,
    compute_program_key,
    compute_required_go,
    parse_go_version,
    write_link,
)

GO = "go version go1.26.8 linux/amd64"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    module = tmp_path / "kube"
    (module / "pause").mkdir(parents=True)
    (module / "go.mod").write_text("module x\n\ngo 1.25.0\n")
    (module / "go.sum").write_text("")
    (module / "main.go").write_text("package main\n")
    (module / "pause" / "main.go").write_text("package main\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (GO, (1, 26, 8)),
        ("go version go1.27 linux/arm64", (1, 27)),
        ("go 1.25.0", (1, 25, 0)),
    ],
)
def test_go_versions(text: str, version: tuple[int, ...]) -> None:
    assert parse_go_version(text) == version


def test_no_go_version() -> None:
    with pytest.raises(ValueError, match="no Go version in 'gopher'"):
        parse_go_version("gopher")


def test_equal_inputs_give_equal_keys(sources: Path) -> None:
    assert compute_program_key(KUBE, GO, sources) == compute_program_key(KUBE, GO, sources)


@pytest.mark.parametrize("file", ["kube/go.mod", "kube/go.sum", "kube/main.go"])
def test_each_input_file_changes_the_key(sources: Path, file: str) -> None:
    before = compute_program_key(KUBE, GO, sources)
    (sources / file).write_text((sources / file).read_text() + "// changed\n")
    assert compute_program_key(KUBE, GO, sources) != before


def test_a_new_source_file_changes_the_key(sources: Path) -> None:
    before = compute_program_key(KUBE, GO, sources)
    (sources / "kube" / "more.go").write_text("package main\n")
    assert compute_program_key(KUBE, GO, sources) != before


def test_go_version_and_flags_change_the_key(sources: Path) -> None:
    keys = {
        compute_program_key(program, go, sources)
        for program in (KUBE, replace(KUBE, version_flags=()), replace(KUBE, static=True))
        for go in (GO, "go version go1.27.3 linux/amd64")
    }
    assert len(keys) == 6


def test_a_program_of_another_folder_keeps_its_key(sources: Path) -> None:
    before = compute_program_key(PAUSE, GO, sources)
    (sources / "kube" / "main.go").write_text("package main // changed\n")
    assert compute_program_key(PAUSE, GO, sources) == before


@pytest.mark.parametrize("program", [KUBE, PAUSE, COREDNS, HELM])
def test_every_program_has_a_module_here(program: Program) -> None:
    assert (SOURCES / program.module / "go.mod").exists()
    assert (SOURCES / program.module / "go.sum").exists()


def test_version_stamp_is_that_of_the_required_module() -> None:
    modules = (SOURCES / "kube" / "go.mod").read_text()
    assert f"k8s.io/kubernetes {KUBERNETES_VERSION}\n" in modules
    staging = KUBERNETES_VERSION.replace("v1.", "v0.")
    replaced = [line.split() for line in modules.splitlines() if " => k8s.io/" in line]
    assert replaced
    assert all(words[-1] == staging for words in replaced)


def test_required_go_is_the_highest(sources: Path) -> None:
    (sources / "other").mkdir()
    (sources / "other" / "go.mod").write_text("module y\n\ngo 1.26.1\n\ntool example.com/x\n")
    assert compute_required_go(sources) == (1, 26, 1)


def test_link_is_moved(tmp_path: Path) -> None:
    link = tmp_path / "kubectl"
    for target in ("kube-1", "kube-2", "kube-2"):
        write_link(link, target)
        assert str(link.readlink()) == target
    assert [path.name for path in tmp_path.iterdir()] == ["kubectl"]
