"""Which pods are asked, and at which address."""

from __future__ import annotations

from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.engines.targets import WORKER_INDEX, choose_targets
from bidikv_operator.tests.engine_samples import make_pod


def test_engines_are_asked_in_a_fixed_order() -> None:
    pods = [
        make_pod("b", "prefill", "10.0.0.2"),
        make_pod("a", "decode", "10.0.0.3"),
        make_pod("a2", "prefill", "fd::1"),
    ]
    targets = choose_targets(pods, {})
    assert [(target.role, target.pod, target.address, target.report_address) for target in targets] == [
        ("decode", "a", "10.0.0.3:5700", "10.0.0.3:5800"),
        ("prefill", "a2", "[fd::1]:5700", "[fd::1]:5800"),
        ("prefill", "b", "10.0.0.2:5700", "10.0.0.2:5800"),
    ]


def test_each_rank_is_an_engine_of_its_own() -> None:
    targets = choose_targets([make_pod("p", "prefill"), make_pod("d", "decode")], {"prefill": 3, "decode": 1})
    assert [(target.pod, target.address, target.report_address) for target in targets] == [
        ("d", "10.0.0.1:5700", "10.0.0.1:5800"),
        ("p", "10.0.0.1:5700", "10.0.0.1:5800"),
        ("p", "10.0.0.1:5701", "10.0.0.1:5801"),
        ("p", "10.0.0.1:5702", "10.0.0.1:5802"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"ip": None},
        {"started": False},
        {"deleted": True},
        {"labels": {names.LABEL_ROLE: "router"}},
        {"labels": {WORKER_INDEX: "1"}},
    ],
)
def test_others_are_not_asked(changes: dict[str, Any]) -> None:
    assert choose_targets([make_pod("p", **changes)], {}) == ()
    assert len(choose_targets([make_pod("p", labels={WORKER_INDEX: "0"})], {})) == 1


def test_a_pod_without_a_status_is_not_asked() -> None:
    pod = make_pod("p")
    del pod["status"]
    assert choose_targets([pod], {}) == ()
