"""Hashes that name what runs: literal values, as a change of one restarts every engine of every user."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_operator.rollout.revision import Identity, choose_telling_arguments, compute_group, compute_identity

Object = dict[str, Any]
SMALL: Object = {
    "model": {"source": {"path": "/models/small"}},
    "image": "vllm/vllm-openai:v0.32.0",
    "fabric": {"type": "TCP"},
}
FULL: Object = {
    "model": {
        "source": {"huggingFace": {"repository": "Qwen/Qwen3-32B", "revision": "abc123", "tokenSecretName": "hub"}},
        "servedName": "chat",
    },
    "image": "vllm/vllm-openai:v0.32.0",
    "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge", "verification": {"gate": "Ready"}},
    "kvReuse": {"mode": "Bidirectional"},
    "prefill": {"replicas": 2, "tensorParallelSize": 4, "extraArgs": ["--max-num-seqs", "64"]},
    "decode": {
        "replicas": 4,
        "tensorParallelSize": 2,
        "extraArgs": ["--dtype", "bfloat16"],
        "env": [{"name": "PYTHONPATH", "value": "/plugins"}],
        "podTemplate": {"spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": "4"}}}]}},
    },
    "router": {"replicas": 3},
    "updateStrategy": {"maxUnavailable": "25%", "drainSeconds": 60},
}
"""Written out here: what other tests do with their samples must not move the hashes."""


def change(spec: Object, path: str, value: Any) -> Object:
    """A copy of ``spec`` with one field set."""
    changed = copy.deepcopy(spec)
    *parents, last = path.split(".")
    target = changed
    for key in parents:
        target = target.setdefault(key, {})
    target[last] = value
    return changed


@pytest.mark.parametrize(
    ("spec", "identity"),
    [
        (SMALL, Identity("52c923fd", "96f447dd1a", "17d241610c")),
        (FULL, Identity("532fb6ea", "b1abc078a0", "647ef08ec1")),
    ],
    ids=["small", "full"],
)
def test_hashes_never_change(spec: Object, identity: Identity) -> None:
    assert compute_identity(spec) == identity


NOTHING = ""
BOTH = "prefill decode"
ENGINE = {"spec": {"containers": [{"name": "engine", "image": "fork:v1"}]}}
SIDECAR = {"spec": {"containers": [{"name": "engine", "resources": {}}, {"name": "sidecar", "image": "x"}]}}


@pytest.mark.parametrize(
    ("path", "value", "group", "inputs"),
    [
        # path, value, whether the group changes, the roles whose template is built anew
        ("image", "vllm/vllm-openai:v0.33.0", True, BOTH),
        ("runtime.image", "registry.example/runtime:v2", True, BOTH),
        ("runtime.restart", "again", True, BOTH),
        ("model.source.path", "/models/other", True, BOTH),
        ("model.source.huggingFace", {"repository": "a/b", "revision": "c"}, True, BOTH),
        ("fabric.type", "EFA", True, BOTH),
        ("decode.extraArgs", ["--kv-cache-dtype", "fp8"], True, "decode"),
        ("prefill.env", [{"name": "VLLM_ATTENTION_BACKEND", "value": "X"}], True, "prefill"),
        ("prefill.podTemplate", ENGINE, True, "prefill"),
        ("prefill.nodesPerReplica", 2, True, "prefill"),
        ("a.field.of.later", 1, False, BOTH),
        ("model.servedName", "other", False, BOTH),
        ("model.maxLength", 4096, False, BOTH),
        ("model.loraAdapters", [{"name": "x", "source": {"path": "/x"}}], False, BOTH),
        ("imagePullSecrets", ["registry"], False, BOTH),
        ("kvReuse.mode", "OneWay", False, NOTHING),
        ("kvReuse.retention", {"policy": "LRU"}, False, BOTH),
        ("fabric.privileged", "Enabled", False, BOTH),
        ("updateStrategy.drainSeconds", 60, False, BOTH),
        ("security.podSecurity", "Unrestricted", False, BOTH),
        ("prefill.tensorParallelSize", 2, False, "prefill"),
        ("decode.extraArgs", ["--max-num-seqs", "16", "--enable_log_requests"], False, "decode"),
        ("decode.env", [{"name": "OMP_NUM_THREADS", "value": "1"}], False, "decode"),
        ("decode.podTemplate", SIDECAR, False, "decode"),
        ("prefill.nodesPerReplica", 1, False, "prefill"),
        ("prefill.replicas", 7, False, NOTHING),
        ("router", {"replicas": 3, "debug": "Enabled"}, False, NOTHING),
        ("autoscaling.mode", "External", False, NOTHING),
        ("monitoring.podMonitor", "Enabled", False, NOTHING),
        ("updateStrategy.maxSurge", 1, False, NOTHING),
        ("security.networkPolicy", "Disabled", False, NOTHING),
        ("security.peerToken", {"rotation": "now"}, False, NOTHING),
        ("fabric.verification", {"gate": "Ready"}, False, NOTHING),
        ("healing.mode", "Disabled", False, NOTHING),
        ("paused", True, False, NOTHING),
        ("kvReuse", {}, False, NOTHING),
        ("prefill", {"extraArgs": [], "env": []}, False, NOTHING),
    ],
)
def test_what_a_change_means(path: str, value: Any, group: bool, inputs: str) -> None:
    before, after = compute_identity(SMALL), compute_identity(change(SMALL, path, value))
    assert (before.group != after.group) == group
    changed = {role for role in BOTH.split() if before.input_of(role) != after.input_of(role)}
    assert changed == set(inputs.split())


def test_the_hub_s_secret_is_not_of_the_group() -> None:
    hub = {"repository": "a/b", "revision": "c"}
    plain = change(SMALL, "model.source", {"huggingFace": hub})
    secret = change(SMALL, "model.source", {"huggingFace": {**hub, "tokenSecretName": "hub"}})
    assert compute_group(plain) == compute_group(secret)
    assert compute_identity(plain).prefill_input != compute_identity(secret).prefill_input


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["--max-num-seqs", "16", "--dtype", "float16"], ["--dtype", "float16"]),
        (["--max_num_seqs=16", "--kv_cache_dtype=fp8"], ["--kv-cache-dtype=fp8"]),
        (["--no-enable-chunked-prefill", "--seed", "7"], ["--seed", "7"]),
        (["--compilation-config.level", "3", "-O3", "--seed", "-1"], ["-O3", "--seed", "-1"]),
        (["--stream-interval", "-1"], []),
        (["--unknown", "--allowed-origins", "a", "b", "--block-size", "16"], ["--unknown", "--block-size", "16"]),
        ([], []),
    ],
)
def test_telling_arguments(arguments: list[str], telling: list[str]) -> None:
    assert choose_telling_arguments(arguments) == telling


@given(st.permutations(["OMP_NUM_THREADS", "A", "B", "C"]))
def test_the_order_of_variables_says_nothing_to_kv(order: list[str]) -> None:
    def group(variables: list[str]) -> str:
        return compute_group(change(SMALL, "prefill.env", [{"name": name, "value": "1"} for name in variables]))

    assert group(order) == group(["A", "B", "C"])
