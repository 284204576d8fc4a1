"""When a child counts as changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings

from bidikv_operator import names
from bidikv_operator.build import build_all
from bidikv_operator.drift import cut, is_unchanged, mark_applied, record_applied
from bidikv_operator.tests.samples import resolve, valid_resources

Object = dict[str, Any]


def with_defaults(value: Any) -> Any:
    """What an API server adds: fields beside ours at every level, never items of our lists."""
    if isinstance(value, dict):
        return {**{key: with_defaults(item) for key, item in value.items()}, "addedByServer": {"x": 1}}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    return value


@given(valid_resources())
@settings(deadline=None)
def test_defaults_of_the_server_are_no_drift(resource: Object) -> None:
    for _, manifest in build_all(resolve(resource)):
        desired = mark_applied(manifest)
        assert is_unchanged(desired, with_defaults(desired), None)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({"a": 2}, {"a": 1}),
        ({}, {"a": 1}),
        (None, {"a": 1}),
        ({}, {"emptyDir": {}}),
        ({"args": ["x"]}, {"args": ["x", "y"]}),
        ({"args": ["x", "y"]}, {"args": ["x"]}),
        ({"args": ["y", "x"]}, {"args": ["x", "y"]}),
        ({"env": [{"name": "B"}]}, {"env": [{"name": "A"}]}),
        ({"containers": [{"name": "a", "image": "2"}]}, {"containers": [{"name": "a", "image": "1"}]}),
        ({"volumeMounts": [{"name": "v", "mountPath": "/b"}]}, {"volumeMounts": [{"name": "v", "mountPath": "/a"}]}),
        ({"ownerReferences": []}, {"ownerReferences": [{"name": "x", "uid": "1"}]}),
        ({"a": "text"}, {"a": {"b": 1}}),
        ({"a": "text"}, {"a": [1]}),
    ],
)
def test_drift(live: Any, desired: Object) -> None:
    assert not is_unchanged(desired, live, None)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"env": [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1"}]}),
        ({"ports": [{"name": "http", "port": 1, "nodePort": 3}]}, {"ports": [{"name": "http", "port": 1}]}),
        ({"rules": [{"verbs": ["get"], "x": 1}]}, {"rules": [{"verbs": ["get"]}]}),
        ({"emptyDir": {}}, {"emptyDir": {}}),
    ],
)
def test_no_drift(live: Any, desired: Object) -> None:
    assert is_unchanged(desired, live, None)


def test_values_that_the_server_rewrites_are_no_drift_after_an_apply() -> None:
    desired = {"cpu": "0.5", "memory": "5120Mi"}
    answer = {"cpu": "500m", "memory": "5Gi"}
    last = record_applied(desired, answer)
    assert is_unchanged(desired, answer, last)
    assert not is_unchanged(desired, {**answer, "cpu": "600m"}, last)
    # Without the memory of an answer the rewritten value looks like drift, once.
    assert not is_unchanged(desired, answer, None)


def test_the_version_of_the_outcome_spares_the_comparison() -> None:
    desired = {"metadata": {"name": "x"}, "a": 1}
    answer = {"metadata": {"name": "x", "resourceVersion": "5"}, "a": 1}
    last = record_applied(desired, answer)
    assert is_unchanged(desired, {"metadata": {"resourceVersion": "5"}}, last)
    assert not is_unchanged({**desired, "a": 2}, answer, last)
    assert is_unchanged(desired, {**answer, "metadata": {"name": "x", "resourceVersion": "6"}}, last)
    assert not is_unchanged(desired, {"metadata": {"name": "x", "resourceVersion": "6"}, "a": 2}, last)


def test_a_changed_wish_is_never_unchanged() -> None:
    answer = {"a": 1, "b": 2}
    last = record_applied({"a": 1, "b": 2}, answer)
    assert not is_unchanged({"a": 1}, answer, last), "b has to go"


def test_the_mark_tells_a_later_process_that_a_field_has_to_go() -> None:
    before = mark_applied({"metadata": {"name": "x"}, "env": [{"name": "A"}, {"name": "B"}]})
    live = copy.deepcopy(before)
    after = mark_applied({"metadata": {"name": "x"}, "env": [{"name": "A"}]})
    assert is_unchanged(before, live, None)
    assert not is_unchanged(after, live, None)
    assert after["metadata"]["annotations"].keys() == {names.ANNOTATION_APPLIED_HASH}


def test_cut_keeps_the_order_of_the_wish() -> None:
    live = {"env": [{"name": "B", "value": "2"}, {"name": "A", "value": "1", "more": 1}]}
    desired = {"env": [{"name": "A", "value": "0"}, {"name": "B", "value": "2"}]}
    assert cut(live, desired) == {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
