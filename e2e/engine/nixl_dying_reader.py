"""A NIXL agent that is read from, and one that stops in the middle of a read, as processes of their own.

Run by the engine's interpreter: ``python -m e2e.engine.nixl_dying_reader source [as-is]`` prints what a reader needs
and then stays; ``... reader`` takes that line from its standard input, begins a read of many pieces and stops itself
with SIGSTOP, so that the source's replies wait for the socket. ``as-is`` leaves out the correction of UCX's requests.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from typing import Any

PIECES, PIECE = 4096, 65536
"""256 MiB, which does not fit in the sockets' buffers; a gap between the pieces keeps NIXL from joining them."""
GAP = 64
LIFETIME_SECONDS = 300.0
BEGUN = 64
"""Pieces after whose arrival the reader stops."""
ATTEMPTS = 20


def _build_agent(name: str) -> tuple[Any, Any, Any]:
    """An agent, the descriptors of its memory, one a piece, and the memory, which must be kept."""
    import numpy
    from nixl._api import nixl_agent, nixl_agent_config

    from bidikv_runtime.connector.agent import agent_settings

    with agent_settings(nixl_agent, 5000):
        agent = nixl_agent(name, nixl_agent_config(num_threads=1))
    memory: Any = numpy.frombuffer(mmap.mmap(-1, PIECES * PIECE), dtype=numpy.uint8)
    agent.register_memory([(memory.ctypes.data, memory.size, 0, "")], "DRAM")
    table = numpy.zeros((PIECES, 3), dtype=numpy.uint64)
    table[:, 0] = memory.ctypes.data + numpy.arange(PIECES, dtype=numpy.uint64) * PIECE
    table[:, 1] = PIECE - GAP
    return agent, table, memory


def be_source() -> None:
    agent, table, memory = _build_agent("source")
    memory[:] = 1  # to be told from the reader's zeros
    print(json.dumps([agent.get_agent_metadata().hex(), table.tolist()]), flush=True)
    time.sleep(LIFETIME_SECONDS)


def be_reader() -> None:
    import numpy

    metadata, remote_table = json.loads(sys.stdin.readline())
    agent, table, memory = _build_agent("reader")
    source = agent.add_remote_agent(bytes.fromhex(metadata))
    ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(table, "DRAM"))
    theirs = agent.prep_xfer_dlist(source, agent.get_xfer_descs(numpy.array(remote_table, dtype=numpy.uint64), "DRAM"))
    pieces = numpy.arange(PIECES)
    for attempt in range(ATTEMPTS):
        memory[:] = 0
        read = agent.make_prepped_xfer("READ", ours, pieces, theirs, pieces)
        agent.transfer(read)
        while agent.check_xfer_state(read) == "PROC":
            # The first two connect all that takes part. One of which most has come was looked at too late.
            if attempt >= 2 and BEGUN <= numpy.count_nonzero(memory[::PIECE]) < PIECES // 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.0005)
        agent.release_xfer_handle(read)
    sys.exit("every read was over before it could be stopped in its middle")


if __name__ == "__main__":
    if "as-is" in sys.argv:
        from bidikv_runtime.connector import agent as agent_module

        agent_module._zero_requests = lambda agent_class: None
    if sys.argv[1] == "source":
        be_source()
    else:
        be_reader()
