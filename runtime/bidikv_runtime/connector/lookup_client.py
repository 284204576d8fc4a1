"""Questions to lookup ports: many sources at once, none waited for past its deadline.

Used by one thread (the scheduler's, or a worker's); zmq's own thread does the networking. A source that stays silent is
not asked again for a while, so a dead one costs one deadline and not one per request.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.sources import Source

MAXIMUM_CONNECTIONS: Final = 64
"""Open connections; the least recently used one is closed beyond."""
QUEUE_LENGTH: Final = 64
"""Requests queued for a source that does not take them; more are not sent."""


class Question:
    """One request to one source, answered, open or silent."""

    def __init__(self, source: Source, deadline: float) -> None:
        self.source = source
        self.deadline = deadline
        self.reply: wire.Reply | None = None
        self.silent = False

    @property
    def open(self) -> bool:
        return self.reply is None and not self.silent


class LookupClient:
    """Sends questions and collects their replies. Times are of ``time.monotonic``."""

    def __init__(self, silent_period: float) -> None:
        self._silent_period = silent_period
        self._context = zmq.Context(io_threads=1)
        self._sockets: OrderedDict[Source, zmq.Socket[bytes]] = OrderedDict()
        self._open: dict[int, Question] = {}
        self._silent_until: dict[Source, float] = {}
        self._sequence = 0

    def is_silent(self, source: Source) -> bool:
        """Whether the source missed a deadline within the silent period."""
        until = self._silent_until.get(source)
        if until is not None and until <= time.monotonic():
            del self._silent_until[source]
            until = None
        return until is not None

    def avoid(self, source: Source) -> None:
        """Do not ask this source for the silent period: it answers, but reads from it fail."""
        if len(self._silent_until) >= MAXIMUM_CONNECTIONS * 4:  # addresses come from requests: keep none for ever
            self._silent_until.clear()
        self._silent_until[source] = time.monotonic() + self._silent_period

    def ask(self, source: Source, build: Callable[[int], wire.Request], seconds: float) -> Question:
        """Send the request that ``build`` makes for a fresh sequence number; never blocks.

        The question turns silent after ``seconds``, or at once when the source's queue is full.
        """
        self._sequence += 1
        question = Question(source, time.monotonic() + seconds)
        try:
            self._socket(source).send(wire.encode(build(self._sequence)), zmq.NOBLOCK)
        except zmq.ZMQError:  # full queue, or an address that zmq cannot parse
            self._give_up(question)
        else:
            self._open[self._sequence] = question
        return question

    def poll(self, seconds: float = 0.0) -> None:
        """Collect replies that are there, waiting up to ``seconds`` for the first; turn late questions silent."""
        if self._open:
            next_deadline = min(question.deadline for question in self._open.values())
            seconds = max(0.0, min(seconds, next_deadline - time.monotonic()))
            poller = zmq.Poller()
            for socket in {self._sockets[q.source] for q in self._open.values() if q.source in self._sockets}:
                poller.register(socket, zmq.POLLIN)
            for socket, _ in poller.poll(math.ceil(seconds * 1000)):
                self._receive(socket)
        now = time.monotonic()
        for sequence, question in list(self._open.items()):
            if question.deadline <= now:
                del self._open[sequence]
                self._give_up(question)

    def wait(self, questions: Sequence[Question], seconds: float) -> None:
        """Poll until none of ``questions`` is open or ``seconds`` have passed."""
        end = time.monotonic() + seconds
        while any(question.open for question in questions):
            left = end - time.monotonic()
            if left <= 0:
                return
            self.poll(left)

    def close(self) -> None:
        """Close every connection; open questions stay unanswered."""
        self._open.clear()
        self._context.destroy(linger=0)

    def _socket(self, source: Source) -> zmq.Socket[bytes]:
        socket = self._sockets.get(source)
        if socket is None:
            while len(self._sockets) >= MAXIMUM_CONNECTIONS:
                self._sockets.popitem(last=False)[1].close(0)
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1 if ":" in source.host else 0)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAXIMUM_BYTES)
            socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
            socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
            try:
                socket.connect(f"tcp://{source}")
            except zmq.ZMQError:
                socket.close(0)
                raise
            self._sockets[source] = socket
        self._sockets.move_to_end(source)
        return socket

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = wire.decode_reply(data)
            except wire.WireError:
                continue  # not one of ours: the question's deadline covers it
            question = self._open.pop(reply.sequence, None)
            if question is not None:
                question.reply = reply

    def _give_up(self, question: Question) -> None:
        question.silent = True
        self.avoid(question.source)
        # What zmq has queued for the source is stale; a new connection also finds a source that moved behind a name.
        socket = self._sockets.pop(question.source, None)
        if socket is not None:
            socket.close(0)
