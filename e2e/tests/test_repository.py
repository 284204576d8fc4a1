"""Rules of the repository that no linter knows."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.install import ROOT

FOLDERS = ("operator", "runtime", "crds", "charts", "e2e")
READMES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md"))
ROW = re.compile(r"^\|[^|]*\|(?P<where>.*)\|\s*$")
PATH = re.compile(r"`([\w./*-]+)`")


def paths_in_tables(readme: Path) -> list[str]:
    """What looks like a path in the last column of a README's tables "to change X, edit Y" and of its promises."""
    found: list[str] = []
    in_map = False
    for line in readme.read_text().splitlines():
        row = ROW.match(line)
        in_map = row is not None and (in_map or line.startswith(("| To change", "| Promise")))
        if row and in_map:
            found += [p for p in PATH.findall(row["where"]) if "/" in p or p.endswith((".py", ".yaml", ".json", ".go"))]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_top_folder_has_a_map(folder: str) -> None:
    readme = ROOT / folder / "README.md"
    assert readme.exists(), f"{folder}/README.md is missing"
    assert paths_in_tables(readme), f"{folder}/README.md has no table 'to change X, edit Y'"


@pytest.mark.parametrize("readme", READMES, ids=lambda p: str(p.parent.relative_to(ROOT)))
def test_paths_named_in_the_maps_exist(readme: Path) -> None:
    missing = [p for p in paths_in_tables(readme) if not list(readme.parent.glob(p)) and not list(ROOT.glob(p))]
    assert not missing, f"{readme.relative_to(ROOT)} names {missing}, which do not exist"


def test_operator_is_still_the_standard_library() -> None:
    """A folder called ``operator`` stands at the root: as a package it would break every ``import operator``."""
    assert Path(operator.__file__ or "").is_relative_to(Path(sys.base_prefix) / "lib")
    assert not list((ROOT / "operator").glob("*.py")), "operator/ holds packages only, never a .py file of its own"


def test_operator_is_the_standard_library_when_the_root_is_on_the_path() -> None:
    code = "import operator, collections; print(operator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert "bidikv" not in done.stdout


def test_no_path_of_a_machine_and_no_registry_in_the_tree() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    words = re.compile("|".join(["/wo" + "rk/", "pypi" + r"\.org", "proxy" + r"\.golang", "index-" + "url"]))
    guilty = []
    for name in tracked.stdout.splitlines():
        file = ROOT / name
        if file.suffix not in {".sum", ".png"} and file.is_file() and words.search(file.read_text(errors="replace")):
            guilty.append(name)
    assert not guilty


def test_git_ignores_no_source() -> None:
    """A folder called ``build`` is a package here; what git ignores is also missing from the wheel."""
    argv = [
        "git",
        "ls-files",
        "--others",
        "--ignored",
        "--exclude-standard",
        "--",
        "operator",
        "runtime",
        "e2e",
        "charts",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    sources = [name for name in done.stdout.splitlines() if name.endswith((".py", ".yaml", ".tpl", ".go", ".json"))]
    assert not sources
