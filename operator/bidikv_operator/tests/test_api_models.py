"""The models as users and the operator meet them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bidikv_operator.api.v1alpha1 import BidiKVInference, EngineRole, FabricSpec, Model, ModelSource, PodResources

SMALLEST: dict[str, Any] = {
    "apiVersion": "serving.bidikv.io/v1alpha1",
    "kind": "BidiKVInference",
    "metadata": {"name": "a"},
    "spec": {"model": {"source": {"path": "/m"}}, "image": "x:1", "fabric": {"type": "TCP"}},
}


def test_the_smallest_resource_says_nothing_that_it_was_not_told() -> None:
    spec = BidiKVInference.model_validate(SMALLEST).spec
    assert spec.model_dump(by_alias=True, exclude_none=True) == SMALLEST["spec"]


def test_fields_of_a_newer_crd_are_ignored() -> None:
    newer = SMALLEST | {"spec": SMALLEST["spec"] | {"invented": {"later": 1}}}
    assert BidiKVInference.model_validate(newer) == BidiKVInference.model_validate(SMALLEST)


def test_resources_can_be_written_in_python() -> None:
    role = EngineRole(tensor_parallel_size=2, extra_args=["--dtype", "float32"])
    assert role.model_dump(by_alias=True, exclude_none=True) == {
        "tensorParallelSize": 2,
        "extraArgs": ["--dtype", "float32"],
    }


def test_models_are_frozen() -> None:
    fabric = FabricSpec(type="TCP")
    with pytest.raises(ValidationError, match="frozen"):
        fabric.type = "EFA"


@pytest.mark.parametrize("cpu", [0, 4097, True, "0", "0m", "4 CPUs", "1e3", "12345.678"])
def test_bounds_of_a_number_or_a_word_hold_in_python_too(cpu: Any) -> None:
    with pytest.raises(ValidationError, match="cpu"):
        PodResources.model_validate({"cpu": cpu})


@pytest.mark.parametrize(
    ("field", "value"), [("maxLength", 0), ("maxLength", 2**24 + 1), ("servedName", ""), ("servedName", "a" * 254)]
)
def test_bounds_hold_in_python_too(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        Model.model_validate({"source": ModelSource(path="/m"), field: value})
