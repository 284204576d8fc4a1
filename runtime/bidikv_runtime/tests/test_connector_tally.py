"""The report's totals: what was read, what failed, and the slowest peer that still matters."""

from __future__ import annotations

from bidikv_runtime.connector.tally import MAXIMUM_PEERS, RECENT_SECONDS, TransportTally
from bidikv_runtime.connector.transport import TransportInfo
from bidikv_runtime.contract import TransportReport


def build(tally: TransportTally) -> TransportReport:
    report = tally.build()
    assert report is not None
    return report


def test_nothing_is_told_before_the_workers_have() -> None:
    tally = TransportTally()
    tally.note_read("a", 100, 1.0)
    assert tally.build() is None
    tally.info = TransportInfo("LIBFABRIC", "tcp", "detail", "slow")
    assert tally.build() == TransportReport("LIBFABRIC", "tcp", "slow", read_bytes=100)


def test_the_slowest_peer_counts() -> None:
    tally = TransportTally()
    tally.info = TransportInfo("UCX", "tcp", "")
    tally.note_bandwidth("a", 3e9, 0.0)
    tally.note_bandwidth("b", 1e9, 0.0)
    tally.note_bandwidth("c", 2e9, 0.0)
    for _ in range(3):
        tally.note_read("a", 10, 1.0)
    tally.note_failure()
    assert build(tally) == TransportReport("UCX", "tcp", "", 30, 1, 1e9)
    assert tally.list_bandwidths() == {"a": 3e9, "b": 1e9, "c": 2e9}
    tally.note_bandwidth("b", 4e9, 2.0)  # restarted at the same address
    assert build(tally).bandwidth == 2e9


def test_a_peer_that_is_read_no_more_counts_no_more_once_others_are() -> None:
    tally = TransportTally()
    tally.info = TransportInfo("UCX", "tcp", "")
    tally.note_bandwidth("gone", 1e6, 0.0)
    tally.note_bandwidth("here", 1e9, 0.0)
    tally.note_read("here", 1, RECENT_SECONDS)
    assert build(tally).bandwidth == 1e6
    tally.note_read("here", 1, RECENT_SECONDS + 1)
    assert build(tally).bandwidth == 1e9


def test_peers_are_bounded_and_the_busy_ones_stay() -> None:
    tally = TransportTally()
    tally.note_bandwidth("busy", 1.0, 0.0)
    for number in range(MAXIMUM_PEERS + 5):
        tally.note_bandwidth(f"peer {number}", 2.0, float(number))
        tally.note_read("busy", 1, float(number))
    assert len(tally.list_bandwidths()) == MAXIMUM_PEERS
    assert "busy" in tally.list_bandwidths()
