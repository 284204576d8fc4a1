"""The connector adds nothing to a vLLM image: it imports only what the image has."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import bidikv_runtime.connector

FOLDER = Path(bidikv_runtime.connector.__file__).parent
ALLOWED = {"msgspec", "zmq"}
WITH_VLLM = {
    "connector.py",
    "metadata.py",
    "refusal.py",
    "request_hashes.py",
    "scheduler.py",
    "stats.py",
    "tail.py",
    "worker.py",
}
WITH_TORCH = {"worker.py"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_imports(path: Path) -> None:
    foreign = {name for name in imported(path) if name.split(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in foreign if name.startswith("bidikv_runtime.")}
    assert all(name.startswith(("bidikv_runtime.connector", "bidikv_runtime.contract")) for name in ours)
    allowed = ALLOWED | ({"vllm"} if path.name in WITH_VLLM else set())
    allowed |= {"torch"} if path.name in WITH_TORCH else set()
    assert {name.split(".")[0] for name in foreign - ours} <= allowed
