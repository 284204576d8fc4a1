"""The lookup port: a thread beside the scheduler that answers LOOKUP and VALIDATE from the publication index.

It needs no engine step, so an idle engine answers and stays idle. It keeps nothing per reader: a reader that goes away
in the middle of a read leaves nothing behind, and a restarted source is told apart by its epoch alone. Which blocks
were read is passed on to the scheduler, for whom a validated read ends the hand-over of a prefill; whose session was
asked for and read, to the sessions' table.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Final

import zmq

from bidikv_runtime.connector import tokens as authentication
from bidikv_runtime.connector import wire
from bidikv_runtime.connector.compatibility import Compatibility, describe_source, explain_parallelism
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.tokens import Tokens

STOP_SECONDS: Final = 5.0
"""How long ``stop`` waits for the thread, which is at most in the middle of one answer."""
SWITCH_SECONDS: Final = 0.0005
"""How soon a thread that computes lets this one have the interpreter. It gives it up at each of the five system calls
of an answer, and waits up to Python's 5 ms each time to get it back. Measured beside such a thread on a loaded machine
of two cores (median, lookup and validation of 750 blocks): 5.9-7.6 ms with Python's interval, 1.3-4.3 ms with this one;
0.8-1.3 ms when there is no such thread."""
RECEIVED_LENGTH: Final = 8
"""Messages taken from a reader before their turn; the others wait in its connection."""
REPLIES_LENGTH: Final = 512
"""Replies queued for a reader that does not take them; zmq drops what is over, and the reader's deadline covers it."""
KEEPALIVE_IDLE_SECONDS: Final = 60
KEEPALIVE_INTERVAL_SECONDS: Final = 15
KEEPALIVE_PROBES: Final = 4
"""A reader whose machine vanished never closes its connection: without probes each would cost a descriptor for ever."""


COUNTS: Final = ("lookups", "validations", "refused", "malformed", "unauthenticated")


class LookupPortError(RuntimeError):
    """The lookup port cannot be opened."""


def answer(index: PublicationIndex, compatibility: Compatibility, peer: wire.Peer, request: wire.Request) -> wire.Reply:
    """Reply to one request. Depends on the index alone."""
    if request.version != wire.VERSION:
        return wire.Refused(request.sequence, wire.VERSION, {}, index.epoch)
    if isinstance(request, wire.Validate):
        valid = index.validate(request.blocks, request.publications) if request.epoch == index.epoch else 0
        return wire.Validated(request.sequence, index.epoch, valid)
    if (
        request.compatibility != compatibility.digest()
        or explain_parallelism(compatibility, request.tensor_parallel_size, peer.tensor_parallel_size) is not None
    ):
        source = describe_source(compatibility, peer.tensor_parallel_size)
        return wire.Refused(request.sequence, wire.VERSION, source, index.epoch)
    return wire.Found(request.sequence, index.epoch, index.lookup(request.hashes), peer)


class LookupServer:
    """Opens the port at construction and serves it until ``stop``."""

    def __init__(
        self,
        index: PublicationIndex,
        compatibility: Compatibility,
        peer: wire.Peer,
        host: str,
        port: int,
        logger: logging.Logger,
        tokens: Tokens | None = None,
        on_session: Callable[[str, bool], None] = lambda session, has_read: None,
    ) -> None:
        """Port 0 takes any free port; ``port`` then holds it. Without ``tokens`` everybody is answered. ``on_session``
        is called in this thread when a reader asks for a session's KV, and when it has read valid KV of it.

        Raises:
            LookupPortError: one sentence that names the address and the remedy.
        """
        self._index, self._compatibility, self._peer, self._logger = index, compatibility, peer, logger
        self._tokens, self._on_session = tokens, on_session
        self._counts = dict.fromkeys(COUNTS, 0)
        self._read_blocks: set[int] = set()
        self._reading = threading.Lock()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAXIMUM_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVED_LENGTH)
        self._socket.setsockopt(zmq.SNDHWM, REPLIES_LENGTH)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_SECONDS)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_SECONDS)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            if port:
                self._socket.bind(f"{address}:{port}")
                self.port = port
            else:
                self.port = self._socket.bind_to_random_port(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise LookupPortError(
                f"the lookup port {host}:{port} cannot be opened ({error}): set bidikv_lookup_port in "
                "kv_connector_extra_config to a free port and BIDIKV_LOOKUP_HOST to an address of this host"
            ) from None
        self._stop, self._stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stopped.bind("inproc://stop")
        self._stop.connect("inproc://stop")
        sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        self._thread = threading.Thread(target=self._serve, daemon=True, name="bidikv-lookup")
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the port. May be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(zmq.ZMQError):  # the thread has ended, and closed its sockets, just now
                self._stop.send(b"", zmq.NOBLOCK)
            self._thread.join(STOP_SECONDS)

    def replace_compatibility(self, compatibility: Compatibility) -> None:
        """Answer only readers equal to this from now on."""
        self._compatibility = compatibility

    def replace_peer(self, peer: wire.Peer) -> None:
        """Name this to readers from now on."""
        self._peer = peer

    def take_read_blocks(self) -> list[int]:
        """Blocks that readers have validated since the last call; called by the scheduler.

        Bounded by the pool: only a block that was published when the question came can be valid.
        """
        with self._reading:
            taken, self._read_blocks = self._read_blocks, set()
        return list(taken)

    def has_read(self, blocks: Iterable[int]) -> bool:
        """Whether readers have validated one of ``blocks`` since they were taken last. For any thread."""
        with self._reading:
            return not self._read_blocks.isdisjoint(blocks)

    def describe(self) -> dict[str, int]:
        """Messages so far, by what became of them. May be called from any thread."""
        return dict(self._counts)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        try:
            while self._stopped not in dict(poller.poll()):
                self._serve_one()
        except zmq.ZMQError:
            self._logger.exception("the lookup port failed: peers recompute instead of reading from this engine")
        finally:
            self._context.destroy(linger=0)

    def _serve_one(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            if len(frames) != 2:
                raise wire.WireError(f"a message has {len(frames)} frames instead of 2")
            data: bytes | None = frames[1]
            assert data is not None
            if self._tokens is not None and (data := self._tokens.open(authentication.REQUEST, data)) is None:
                self._drop("unauthenticated", "no token fits: give all engines the same token file")
                return
            request = wire.decode_request(data)
        except wire.WireError as error:
            self._drop("malformed", str(error))
            return
        reply = answer(self._index, self._compatibility, self._peer, request)
        self._note(request, reply)
        encoded = wire.encode(reply)
        if self._tokens is not None:
            encoded = self._tokens.seal(authentication.REPLY, encoded)
        with contextlib.suppress(zmq.Again):  # a reader that does not take its replies: its deadline covers it
            self._socket.send_multipart((frames[0], encoded), zmq.NOBLOCK)

    def _note(self, request: wire.Request, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Validated):
            self._counts["validations"] += 1
            if isinstance(request, wire.Validate) and reply.valid:
                with self._reading:
                    self._read_blocks.update(request.blocks[: reply.valid])
                if request.session:
                    self._on_session(request.session, True)
        else:
            self._counts["lookups" if isinstance(reply, wire.Found) else "refused"] += 1
            if isinstance(reply, wire.Found) and isinstance(request, wire.Lookup) and request.session:
                self._on_session(request.session, False)

    def _drop(self, kind: str, reason: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] == 1:  # once: whoever can reach the port could fill the log
            self._logger.warning("the lookup port drops %s messages, the first one because %s", kind, reason)
