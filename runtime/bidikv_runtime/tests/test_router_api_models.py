"""Lists of models become one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from bidikv_runtime.router.api.models import build_list, merge_models


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, **more}


def answer(*entries: Any) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


def merged(*answers: bytes) -> Any:
    models = merge_models(answers)
    return None if models is None else json.loads(build_list(models))


def test_the_union_is_in_the_order_of_ids() -> None:
    answers = [answer(entry("base"), entry("b")), answer(entry("base"), entry("a", parent="base")), answer()]
    for order in itertools.permutations(answers):
        assert merged(*order) == {
            "object": "list",
            "data": [entry("a", parent="base"), entry("b"), entry("base")],
        }


def test_of_two_entries_the_first_answers_counts() -> None:
    assert merged(answer(entry("m", created=1)), answer(entry("m", created=2)))["data"] == [entry("m", created=1)]


def test_an_entry_is_not_changed() -> None:
    raw = b'{"data": [{"id":"m", "max_model_len": 4.0e3,"x":"\\u00e9"}]}'
    models = merge_models([raw])
    assert models is not None
    assert b'{"id":"m", "max_model_len": 4.0e3,"x":"\\u00e9"}' in build_list(models)


@pytest.mark.parametrize("odd", [b"", b"[]", b"{}", b'{"data": 1}', b'{"data": [1]}', b'{"data": [{}]}', b"\xff"])
def test_what_is_no_list_does_not_count(odd: bytes) -> None:
    assert merged(odd) is None
    assert merged(odd, answer(entry("m")))["data"] == [entry("m")]


def test_no_models_are_an_empty_list() -> None:
    assert merged(answer()) == {"object": "list", "data": []}
    assert merged() is None
