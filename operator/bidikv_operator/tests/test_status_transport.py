"""What the engines' reports say about the transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_operator import names
from bidikv_operator.engines.reach import GRACE_SECONDS, STALE_SECONDS
from bidikv_operator.names import Role
from bidikv_operator.resolved import ResolvedFabric
from bidikv_operator.state import EngineFacts
from bidikv_operator.status.transport import GIGABIT, compute_transport, compute_transport_facts, find_condition
from bidikv_operator.tests.engine_samples import make_facts, make_report
from bidikv_runtime.contract import TransportReport

TCP, EFA = ResolvedFabric(type="TCP"), ResolvedFabric(type="EFA")
FLOOR = ResolvedFabric(type="EFA", minimum_gigabits_per_second=100)
VERIFIED = {"type": names.TRANSPORT_VERIFIED, "status": "True", "reason": "Verified", "message": "as before"}

UCX = TransportReport("UCX", "tcp", read_bytes=1, bandwidth=2.2 * GIGABIT)
RAIL = TransportReport("LIBFABRIC", "efa", read_bytes=1, bandwidth=180 * GIGABIT)


def engine(role: Role, transport: TransportReport | None, **changes: Any) -> EngineFacts:
    return make_facts(f"{role}-{id(transport)}", role, make_report(transport), **changes)


def pair(prefill: TransportReport | None, decode: TransportReport | None) -> list[EngineFacts]:
    return [engine("prefill", prefill), engine("decode", decode)]


@pytest.mark.parametrize(
    ("fabric", "prefill", "decode", "status", "reason", "words"),
    [
        (TCP, UCX, UCX, "True", "Verified", "UCX over tcp, at about 2 Gb/s"),
        (EFA, RAIL, RAIL, "True", "Verified", "LIBFABRIC over efa, at about 200 Gb/s"),
        (FLOOR, RAIL, RAIL, "True", "Verified", ""),
        # one that has moved bytes proves it for all that use the same
        (EFA, RAIL, TransportReport("LIBFABRIC", "efa"), "True", "Verified", ""),
        (TCP, None, UCX, "True", "Verified", ""),
        (TCP, TransportReport("UCX", "tcp", read_bytes=1), UCX, "True", "Verified", ""),
        (EFA, RAIL, UCX, "False", "WrongBackend", "decode engines read KV with UCX instead of LIBFABRIC"),
        (TCP, RAIL, UCX, "False", "WrongBackend", "prefill engines read KV with LIBFABRIC instead of UCX"),
        (EFA, UCX, UCX, "False", "WrongBackend", "prefill and decode engines"),
        (EFA, RAIL, TransportReport("LIBFABRIC", "tcp"), "False", "FellBackToTCP", "decode engines read KV with"),
        (EFA, RAIL, TransportReport("LIBFABRIC", "rdma"), "False", "WrongBackend", "over rdma instead of efa"),
        (TCP, UCX, TransportReport("UCX", "efa"), "False", "WrongBackend", "UCX over efa instead of tcp"),
        (
            FLOOR,
            RAIL,
            TransportReport("LIBFABRIC", "efa", read_bytes=1, bandwidth=99 * GIGABIT),
            "False",
            "BelowFloor",
            "decode engines read KV at about 100 Gb/s per rank, below the floor of 100 Gb/s",
        ),
        (FLOOR, TransportReport("LIBFABRIC", "efa", read_bytes=1), None, "True", "Verified", "LIBFABRIC over efa"),
        (TCP, UCX, TransportReport("UCX", "tcp", failed_reads=3), "False", "NoTraffic", "decode engines could read no"),
        (TCP, UCX, TransportReport("UCX", "tcp", failed_reads=2), "True", "Verified", ""),
        (TCP, UCX, TransportReport("UCX", "tcp", read_bytes=1, failed_reads=99), "True", "Verified", ""),
        (TCP, TransportReport("UCX", "tcp"), TransportReport("UCX", "tcp"), "Unknown", "NoTraffic", "first requests"),
        (TCP, None, None, "Unknown", "NoTraffic", ""),
    ],
)
def test_table(
    fabric: ResolvedFabric,
    prefill: TransportReport | None,
    decode: TransportReport | None,
    status: str,
    reason: str,
    words: str,
) -> None:
    condition = compute_transport(pair(prefill, decode), fabric, None)
    assert (condition.type, condition.status, condition.reason) == (names.TRANSPORT_VERIFIED, status, reason)
    assert words in condition.message


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ([], "no engine runs"),
        ([make_facts("a")], "have not been asked yet"),
        ([make_facts("a", fault="silent", age_seconds=90)], "port 5800"),
        ([make_facts("a", fault="malformed", age_seconds=90)], "runtime image"),
        ([make_facts("a", fault="refused", age_seconds=90), make_facts("b", fault="silent", age_seconds=90)], "token"),
        ([make_facts("a", report=make_report(UCX), fault="silent", age_seconds=STALE_SECONDS)], "port 5800"),
    ],
)
def test_nobody_tells(engines: list[EngineFacts], words: str) -> None:
    condition = compute_transport(engines, TCP, VERIFIED if not engines else None)
    assert (condition.status, condition.reason) == ("Unknown", "NoReports")
    assert words in condition.message


def test_a_new_leader_leaves_what_was_said_until_it_has_asked() -> None:
    for fabric, facts in (
        (TCP, [make_facts("a"), make_facts("b", fault="silent", age_seconds=GRACE_SECONDS - 1)]),
        (TCP, [engine("decode", None), make_facts("b")]),
    ):
        condition = compute_transport(facts, fabric, VERIFIED)
        assert (condition.status, condition.reason, condition.message) == ("True", "Verified", "as before")
        assert compute_transport_facts(facts, {"backend": "UCX"}) == {"backend": "UCX"}
    bad = [engine("decode", TransportReport("LIBFABRIC", "tcp")), make_facts("b")]
    assert compute_transport(bad, EFA, VERIFIED).reason == "FellBackToTCP", "bad news do not wait"
    assert compute_transport([make_facts("a", age_seconds=GRACE_SECONDS)], TCP, VERIFIED).reason == "NoReports"


@pytest.mark.parametrize(
    ("transports", "facts"),
    [
        ([], None),
        ([None], None),
        ([UCX], {"backend": "UCX", "provider": "tcp", "gigabitsPerSecond": 2}),
        ([RAIL, RAIL, UCX], {"backend": "LIBFABRIC", "provider": "efa", "gigabitsPerSecond": 2}),
        ([TransportReport("UCX", "tcp", bandwidth=0.2 * GIGABIT)], {"backend": "UCX", "provider": "tcp"}),
        ([TransportReport("UCX", "tcp")], {"backend": "UCX", "provider": "tcp"}),
    ],
)
def test_facts(transports: list[TransportReport | None], facts: dict[str, Any] | None) -> None:
    assert compute_transport_facts([engine("decode", transport) for transport in transports], None) == facts


def test_the_live_condition_is_found() -> None:
    assert find_condition({}) is None
    assert find_condition({"conditions": [{"type": "Ready"}, VERIFIED]}) is VERIFIED


transports = st.builds(
    TransportReport,
    backend=st.sampled_from(["UCX", "LIBFABRIC", "none"]),
    provider=st.sampled_from(["efa", "tcp", "rdma", "cxi", "unknown"]),
    read_bytes=st.sampled_from([0, 1, 10**15]),
    failed_reads=st.integers(0, 5),
    bandwidth=st.floats(0, 1e12),
)


@given(
    st.lists(st.none() | transports, max_size=4),
    st.sampled_from([TCP, EFA, FLOOR]),
    st.sampled_from([None, VERIFIED]),
    st.integers(1, 10**9),
)
def test_what_ticks_changes_no_sentence(
    told: list[TransportReport | None], fabric: ResolvedFabric, previous: Mapping[str, Any] | None, more: int
) -> None:
    engines = [make_facts(str(n), "decode", make_report(one)) for n, one in enumerate(told)]
    later = [
        make_facts(
            f"other-{n}",
            "decode",
            make_report(one and replace(one, read_bytes=one.read_bytes * (more + 1)), requests=more),
        )
        for n, one in enumerate(told)
    ]
    first = compute_transport(engines, fabric, previous)
    assert first == compute_transport(later, fabric, previous)
    assert first.message
    # True is said only when something has moved, and with the fabric's own backend.
    if first.status == "True":
        assert any(one is not None and one.read_bytes for one in told)
        assert all(one is None or one.backend == {"TCP": "UCX", "EFA": "LIBFABRIC"}[fabric.type] for one in told)
