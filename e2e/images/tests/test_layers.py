from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from e2e.images.catalog import (
    ENGINE_FOLDER,
    build_engine_image,
    build_operator_image,
    build_references,
    build_runtime_image,
    build_simulated_engine_image,
)
from e2e.images.oci import Layer
from e2e.images.python_layers import (
    CHECKOUT,
    CONSTRAINTS,
    SIMULATED_ENGINE,
    compute_key,
    find_simulated_engine,
    find_sources,
    parse_extra,
)

PROJECT = (CHECKOUT / "pyproject.toml").read_text()
LAYERS = [Layer(Path("/x"), digest * 64, 1) for digest in "abcd"]


@pytest.mark.parametrize("extra", ["operator", "router", "tracing"])
def test_every_requirement_of_an_image_is_pinned(extra: str) -> None:
    pins = {line.split("==")[0] for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    names = {requirement.split("==")[0] for requirement in parse_extra(PROJECT, extra)}
    assert names
    assert names <= pins


def test_what_the_simulated_engine_imports_is_pinned_and_all_there_is() -> None:
    pins = {line.split("==")[0] for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    assert set(SIMULATED_ENGINE) <= pins
    files = find_simulated_engine()
    names = {path.relative_to(CHECKOUT / "e2e").as_posix() for path in files}
    assert {"__init__.py", "simengine/__main__.py", "simengine/as_vllm/vllm/entrypoints/openai/api_server.py"} <= names
    assert not [name for name in names if "/tests/" in name]
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for path in files
        if path.name not in ("local.py", "resource.py")  # for tests on the host
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    tops = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert tops == {"bidikv_runtime", "e2e", "msgspec", "prometheus_client", "uvicorn", "uvloop"}
    assert {name for name in imported if name.startswith("e2e.")} <= {name for name in imported if "simengine" in name}


def test_unknown_extra() -> None:
    with pytest.raises(KeyError, match="nothing"):
        parse_extra(PROJECT, "nothing")


def test_keys_tell_parts_apart() -> None:
    assert len({compute_key(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [])}) == 4


def test_sources_are_what_the_wheel_holds() -> None:
    names = {path.relative_to(CHECKOUT).as_posix() for path in find_sources()}
    assert "operator/bidikv_operator/names.py" in names
    assert "runtime/bidikv_runtime/contract.py" in names
    assert "crds/serving.bidikv.io_bidikvinferences.yaml" in names
    assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]


def test_images_run_what_the_contract_says() -> None:
    base, dependencies, packages, simulated = LAYERS
    operator = build_operator_image(base, dependencies, packages)
    assert (operator.entrypoint, operator.user) == (("python3", "-m", "bidikv_operator"), "65532:65532")
    runtime = build_runtime_image(base, dependencies, packages)
    assert (runtime.entrypoint, runtime.user) == (("python3", "-m", "bidikv_runtime.router"), "65532:65532")
    engine = build_engine_image(base)
    assert engine.environment["PATH"].startswith(f"{ENGINE_FOLDER}/bin:")
    simengine = build_simulated_engine_image(base, dependencies, packages, simulated)
    assert "PYTHONPATH" not in simengine.environment  # the operator sets another one
    assert simengine.layers[-1] is simulated
    images = {"operator": operator, "runtime": runtime, "engine": engine, "simengine": simengine}
    references = build_references(images, "amd64")
    assert all(
        reference.startswith(f"docker.io/bidikv/{name}:") and len(reference.rsplit(":", 1)[1]) == 12
        for name, reference in references.items()
    )
