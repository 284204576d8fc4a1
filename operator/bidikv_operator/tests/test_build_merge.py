"""The merge of pod template overrides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_operator.build.merge import merge_override

CASES: dict[str, tuple[Any, Any, Any]] = {
    "objects merge": ({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}, "b": 2}),
    "a scalar replaces": ({"a": 1}, {"a": 2}, {"a": 2}),
    "null removes": ({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": None}}, {"b": {"d": 3}}),
    "null of an absent key is nothing": ({"a": 1}, {"b": None, "c": {"d": None}}, {"a": 1, "c": {}}),
    "an unnamed list replaces": ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
    "tolerations replace": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"key": "b"}]},
        {"tolerations": [{"key": "b"}]},
    ),
    "a container merges by name": (
        {"containers": [{"name": "engine", "image": "i", "resources": {"limits": {"gpu": 1}}}]},
        {"containers": [{"name": "engine", "resources": {"requests": {"cpu": 2}}}]},
        {"containers": [{"name": "engine", "image": "i", "resources": {"limits": {"gpu": 1}, "requests": {"cpu": 2}}}]},
    ),
    "a new container is appended": (
        {"containers": [{"name": "engine"}]},
        {"containers": [{"name": "sidecar", "image": "s"}]},
        {"containers": [{"name": "engine"}, {"name": "sidecar", "image": "s"}]},
    ),
    "init containers too": (
        {"initContainers": [{"name": "a", "image": "1"}]},
        {"initContainers": [{"name": "a", "image": "2"}, {"name": "b"}]},
        {"initContainers": [{"name": "a", "image": "2"}, {"name": "b"}]},
    ),
    "an empty list of named items changes nothing": (
        {"containers": [{"name": "engine"}]},
        {"containers": []},
        {"containers": [{"name": "engine"}]},
    ),
    "a volume replaces the one of its name": (
        {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "x", "emptyDir": {}}]},
        {"volumes": [{"name": "shm", "hostPath": {"path": "/d"}}]},
        {"volumes": [{"name": "shm", "hostPath": {"path": "/d"}}, {"name": "x", "emptyDir": {}}]},
    ),
    "a variable replaces the one of its name": (
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "p"}}}]},
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
    ),
    "mounts go by path": (
        {"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
        {"volumeMounts": [{"name": "b", "mountPath": "/a"}, {"name": "c", "mountPath": "/c"}]},
        {"volumeMounts": [{"name": "b", "mountPath": "/a"}, {"name": "c", "mountPath": "/c"}]},
    ),
    "one volume may be mounted twice": (
        {"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
        {"volumeMounts": [{"name": "a", "mountPath": "/b"}]},
        {"volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "a", "mountPath": "/b"}]},
    ),
    "nulls vanish in what is new": (
        {},
        {"affinity": {"podAffinity": None, "nodeAffinity": {"x": 1}}},
        {"affinity": {"nodeAffinity": {"x": 1}}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_merge(case: str) -> None:
    base, override, expected = CASES[case]
    before = copy.deepcopy((base, override))
    assert merge_override(base, override) == expected
    assert (base, override) == before, "the arguments must not change"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4))
def test_merging_twice_is_merging_once(override: dict[str, Any]) -> None:
    base = {"a": {"b": 1}, "containers": [{"name": "engine"}]}
    once = merge_override(base, override)
    assert merge_override(once, override) == once
    assert merge_override(base, {}) == base
