"""The bandwidth probe measures, and whatever goes wrong with it does no harm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bidikv_runtime.connector.bandwidth import BandwidthProbe

SIZE = 1000


class Agent:
    """A NIXL agent whose transfers end in the states that the test lists."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.reads: list[Sequence[int]] = []
        self.lists: list[Any] = []
        self.released: list[Any] = []

    def get_xfer_descs(self, pieces: Any, memory_type: str) -> Any:
        return (memory_type, pieces)

    def prep_xfer_dlist(self, agent_name: str, descriptors: Any) -> Any:
        self.lists.append(descriptors)
        return "list"

    def make_prepped_xfer(self, operation: str, local: Any, ours: Sequence[int], remote: Any, theirs: Any) -> str:
        assert (operation, local, remote) == ("READ", "list", "peer")
        assert list(ours) == list(theirs)
        self.reads.append(ours)
        return f"read {len(self.reads)}"

    def transfer(self, handle: str) -> None:
        pass

    def check_xfer_state(self, handle: str) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def release_xfer_handle(self, handle: str) -> None:
        self.released.append(handle)

    def release_dlist_handle(self, handle: str) -> None:
        self.released.append(handle)


def probe_of(agent: Agent) -> BandwidthProbe:
    return BandwidthProbe(agent, "DRAM", 4096, SIZE, 0)


def test_it_connects_and_then_reads_as_much_as_fits() -> None:
    agent = Agent("PROC", "DONE")
    rate = probe_of(agent).measure("peer", 300, 50, 5.0)
    assert rate is not None
    assert rate > 0
    assert agent.lists == [("DRAM", [(4096, 300, 0), (4396, 300, 0), (4696, 300, 0)])]
    assert agent.reads == [[0], [0, 1, 2]]
    assert agent.released == ["read 1", "read 2", "list"]


def test_a_peer_with_little_memory_is_read_whole() -> None:
    agent = Agent("DONE")
    assert probe_of(agent).measure("peer", 300, 2, 5.0) is not None
    assert agent.reads == [[0], [0, 1]]


def test_descriptors_longer_than_the_buffer_are_not_read() -> None:
    agent = Agent("DONE")
    assert probe_of(agent).measure("peer", SIZE + 1, 50, 5.0) is None
    assert agent.reads == []


@pytest.mark.parametrize("states", [("ERR",), ("DONE", "ERR")])
def test_a_failed_read_measures_nothing(states: tuple[str, ...]) -> None:
    agent = Agent(*states)
    assert probe_of(agent).measure("peer", 300, 50, 5.0) is None
    assert agent.released[-1] == "list"


def test_a_probe_under_way_is_kept_and_there_is_no_other_until_it_has_ended() -> None:
    agent = Agent("PROC")
    probe = probe_of(agent)
    assert probe.measure("peer", 300, 50, 0.0) is None
    assert probe.measure("peer", 300, 50, 5.0) is None
    assert (agent.reads, agent.released) == ([[0]], [])
    agent.states = ["DONE"]
    assert probe.measure("peer", 300, 50, 5.0) is not None
    assert agent.released == ["read 1", "read 2", "read 3", "list"]
