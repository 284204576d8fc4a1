"""Two real NIXL agents, one reading from the other over loopback, through the connector's own wrapper.

Run by the engine's interpreter, which has NIXL and numpy: ``python -m e2e.engine.nixl_loopback``. Prints a JSON object
per case: how many pairs of descriptors were asked for, how many pieces NIXL made of them, and whether every byte of the
reader's memory is what it should be.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

REGIONS, SLOTS, SLOT = 3, 64, 4096
READ_SECONDS = 30.0


@dataclass(frozen=True)
class Result:
    case: str
    pairs: int
    pieces: int
    right: bool


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    from bidikv_runtime.connector.agent import ReadingAgent, agent_settings

    with agent_settings(nixl_agent, 5000):
        return ReadingAgent(nixl_agent(name, nixl_agent_config(num_threads=1, capture_telemetry=True)))


class Side:
    """One agent's memory: ``REGIONS`` regions that lie next to each other and are registered one by one."""

    def __init__(self, name: str) -> None:
        import numpy

        self.agent = _agent(name)
        self.memory: Any = numpy.frombuffer(mmap.mmap(-1, REGIONS * SLOTS * SLOT), dtype=numpy.uint8)
        self.base = self.memory.ctypes.data
        for region in range(REGIONS):
            self.agent.register_memory([(self.base + region * SLOTS * SLOT, SLOTS * SLOT, 0, "")], "DRAM")

    def descriptors(self, length: int, offset: int = 0) -> Any:
        """``length`` bytes of each slot, from ``offset`` on, numbered by region and then by slot."""
        import numpy

        table = numpy.empty((REGIONS * SLOTS, 3), dtype=numpy.uint64)
        table[:, 0] = self.base + numpy.arange(REGIONS * SLOTS, dtype=numpy.uint64) * SLOT + offset
        table[:, 1] = length
        table[:, 2] = 0
        return self.agent.get_xfer_descs(table, "DRAM")


def run() -> Iterator[Result]:
    import numpy

    source, reader = Side("source"), Side("reader")
    random = numpy.random.default_rng(7)
    source.memory[:] = random.integers(1, 256, source.memory.size, dtype=numpy.uint8)
    remote = reader.agent.add_remote_agent(source.agent.get_agent_metadata())

    def read(case: str, local: Any, remote_slots: Any, length: int = SLOT, offset: int = 0) -> Result:
        """Read slots of all regions; ``offset`` is where in the source's slots the read begins."""
        first = numpy.arange(REGIONS)[:, None] * SLOTS
        ours, theirs = (first + local[None, :]).ravel(), (first + remote_slots[None, :]).ravel()
        agent = reader.agent
        local_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", reader.descriptors(length))
        remote_side = agent.prep_xfer_dlist(remote, source.descriptors(length, offset))
        reader.memory[:] = 0
        expected = numpy.zeros_like(reader.memory).reshape(-1, SLOT)
        expected[ours, :length] = source.memory.reshape(-1, SLOT)[theirs, offset : offset + length]
        handle = agent.make_prepped_xfer("READ", local_side, ours, remote_side, theirs, notif_msg=b"done")
        agent.transfer(handle)
        deadline = time.monotonic() + READ_SECONDS
        while (state := agent.check_xfer_state(handle)) == "PROC" and time.monotonic() < deadline:
            time.sleep(0.001)
        right = state == "DONE" and bool((reader.memory == expected.ravel()).all())
        pieces = int(agent.get_xfer_telemetry(handle).descCount)
        agent.release_xfer_handle(handle)
        agent.release_dlist_handle(local_side)
        agent.release_dlist_handle(remote_side)
        return Result(case, len(ours), pieces, right)

    up = numpy.arange(SLOTS)
    yield read("ascending", up, up)
    yield read("descending", up[::-1], up[::-1])
    yield read("ascending from descending", up, up[::-1])
    yield read("half of each slot", up[::-1], up[::-1], SLOT // 2, SLOT // 2)
    for number in range(10):
        count = int(random.integers(1, SLOTS))
        yield read(f"random {number}", random.permutation(SLOTS)[:count], random.permutation(SLOTS)[:count])
        same = random.permutation(SLOTS)[:count]
        yield read(f"random, the same at both ends {number}", same, same)


if __name__ == "__main__":
    for result in run():
        print(json.dumps(asdict(result)), flush=True)
