"""The installer of the connector package."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bidikv_runtime.install import METADATA_FOLDER, install


def make_package(root: Path, text: str = "one") -> Path:
    package = root / "bidikv_runtime"
    for name in ("connector", "connector/tests", "router"):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "contract.py").write_text(f"WORD = {text!r}\n")
    (package / "drain.py").write_text("")
    (package / "connector" / "connector.py").write_text("from bidikv_runtime.contract import WORD\n")
    (package / "contract.py").chmod(0o600)
    return package


def test_copies_only_what_an_engine_imports(tmp_path: Path) -> None:
    target = tmp_path / "target"
    installed = install(target, make_package(tmp_path / "source"))
    assert installed == target / "bidikv_runtime"
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert files == {"__init__.py", "contract.py", "drain.py", "connector/__init__.py", "connector/connector.py"}
    assert {path.name for path in target.iterdir()} == {"bidikv_runtime", METADATA_FOLDER}  # no scratch left


def test_any_user_can_read(tmp_path: Path) -> None:
    installed = install(tmp_path / "target", make_package(tmp_path / "source"))
    for path in (installed, *installed.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    installed = install(target, make_package(source))
    (installed / "stale.py").write_text("")
    install(target, make_package(source, "two"))
    assert "two" in (installed / "contract.py").read_text()
    assert not (installed / "stale.py").exists()


def test_a_failed_run_leaves_the_first(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    package = make_package(source)
    installed = install(target, package)
    (package / "contract.py").unlink()
    with pytest.raises(FileNotFoundError):
        install(target, package)
    assert "one" in (installed / "contract.py").read_text()


def test_vllm_finds_the_plugin(tmp_path: Path) -> None:
    """As vLLM looks for its plugins, in a process that has only that folder."""
    install(tmp_path)
    install(tmp_path)
    code = (
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='vllm.general_plugins')\n"
        "print([(one.name, one.load().__module__) for one in found])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[('bidikv-last-words', 'bidikv_runtime.connector.last_words')]"


def test_the_real_package_imports_from_the_folder(tmp_path: Path) -> None:
    """As an engine would: that folder alone on the path, no site packages."""
    command = [sys.executable, "-m", "bidikv_runtime.install", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    code = "from bidikv_runtime import contract; print(contract.__file__)"
    environment = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path / "bidikv_runtime" / "contract.py")
