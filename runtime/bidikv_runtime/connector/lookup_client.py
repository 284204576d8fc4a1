"""Questions to lookup ports: many sources at once, none waited for past its deadline.

Used by one thread (the scheduler's, or a worker's); zmq's own thread does the networking. What happened with a source
is kept in ``Peers``: one that is silent or refuses is to be left alone for a while.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from bidikv_runtime.connector import tokens as authentication
from bidikv_runtime.connector import wire
from bidikv_runtime.connector.peers import Peers
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.tokens import Tokens

MAXIMUM_CONNECTIONS: Final = 64
"""Open connections; the least recently used one is closed beyond."""
QUEUE_LENGTH: Final = 512
"""Requests queued for a source that does not take them; more are not sent. Requests arrive in bursts."""


Explain = Callable[[wire.Refused], str]
"""Why a source refuses, as the end of a sentence."""


class Question:
    """One request to one source, answered, open or silent."""

    def __init__(self, source: Source, asked: float, deadline: float) -> None:
        self.source = source
        self.asked = asked
        self.deadline = deadline
        self.reply: wire.Reply | None = None
        self.silent = False

    @property
    def open(self) -> bool:
        return self.reply is None and not self.silent


class LookupClient:
    """Sends questions and collects their replies. Times are of ``time.monotonic``."""

    def __init__(
        self,
        silent_period: float,
        silent_period_maximum: float = 60.0,
        *,
        tokens: Tokens | None = None,
        explain: Explain | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """
        Args:
            silent_period: how long a source is left alone after its first silence; doubles with each further one.
            silent_period_maximum: the longest such period.
            tokens: sign questions and check replies with these; None sends plain messages.
            explain: says why a source refuses, for the log and the state.
            logger: gets one line for each refusal that is new, and one for the first reply that no token fits.
        """
        self.peers = Peers(silent_period, silent_period_maximum)
        self.unauthenticated = 0
        """Replies that were dropped because no token fits."""
        self._tokens, self._explain = tokens, explain or _explain_version
        self._logger = logger or logging.getLogger(__name__)
        self._context = zmq.Context(io_threads=1)
        self._sockets: OrderedDict[Source, zmq.Socket[bytes]] = OrderedDict()
        self._open: dict[int, Question] = {}
        self._sequence = secrets.randbits(62)  # a reply recorded earlier, or for another process, fits no question

    def is_silent(self, source: Source) -> bool:
        """Whether the source missed a deadline, or a read from it failed, and its time is not over."""
        return self.peers.is_silent(source, time.monotonic())

    def forget_refusals(self) -> None:
        """Ask those that refused again: this engine's compatibility is another now."""
        self.peers.forget_refusals()

    def is_refused(self, source: Source) -> bool:
        """Whether the source refused a short while ago."""
        return self.peers.is_refused(source, time.monotonic())

    def avoid(self, source: Source) -> None:
        """Do not ask this source for a while: it answers, but reads from it fail."""
        self.peers.note_failure(source, time.monotonic())

    def trust(self, source: Source) -> None:
        """A read from this source was valid: the next one that fails is its first."""
        self.peers.note_success(source)

    def describe(self) -> dict[str, Any]:
        """State for people, JSON types only. May be called from any thread."""
        return {
            "unauthenticated_replies": self.unauthenticated,
            "sources": self.peers.describe(time.monotonic()),
        }

    def ask(self, source: Source, build: Callable[[int], wire.Request], seconds: float) -> Question:
        """Send the request that ``build`` makes for a fresh sequence number; never blocks.

        The question turns silent after ``seconds``, or at once when the source's queue is full (it says no more about
        the source than the questions in the queue will) or its address is none.
        """
        self._sequence += 1
        now = time.monotonic()
        question = Question(source, now, now + seconds)
        data = wire.encode(build(self._sequence))
        if self._tokens is not None:
            data = self._tokens.seal(authentication.REQUEST, data)
        try:
            self._socket(source).send(data, zmq.NOBLOCK)
        except zmq.Again:
            question.silent = True
        except zmq.ZMQError:
            self._give_up(question)
        else:
            self._open[self._sequence] = question
        return question

    def poll(self, seconds: float = 0.0) -> None:
        """Collect replies that are there, waiting up to ``seconds`` for the first; turn late questions silent."""
        answered: set[Source] = set()
        if self._open:
            next_deadline = min(question.deadline for question in self._open.values())
            seconds = max(0.0, min(seconds, next_deadline - time.monotonic()))
            poller = zmq.Poller()
            for socket in {self._sockets[q.source] for q in self._open.values() if q.source in self._sockets}:
                poller.register(socket, zmq.POLLIN)
            for socket, _ in poller.poll(math.ceil(seconds * 1000)):
                answered |= self._receive(socket)
        now = time.monotonic()
        for sequence, question in list(self._open.items()):
            if question.deadline <= now and question.source not in answered:  # its other replies may come right behind
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

    def _receive(self, socket: zmq.Socket[bytes]) -> set[Source]:
        """Take the replies that are there; returns the source if one of them answers a question."""
        answered: set[Source] = set()
        for _ in range(len(self._open) + QUEUE_LENGTH):  # and not for as long as a source sends
            try:
                data: bytes | None = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            assert data is not None
            if self._tokens is not None and (data := self._tokens.open(authentication.REPLY, data)) is None:
                self._count_unauthenticated()
                continue
            try:
                reply = wire.decode_reply(data)
            except wire.WireError:
                continue  # not one of ours: the question's deadline covers it
            question = self._open.get(reply.sequence)
            if question is None or self._sockets.get(question.source) is not socket:
                continue  # too late, or an answer to what another source was asked
            del self._open[reply.sequence]
            question.reply = reply
            answered.add(question.source)
            now = time.monotonic()
            self.peers.note_answer(question.source, now)
            if isinstance(reply, wire.Refused):
                reason = self._explain(reply)
                if self.peers.note_refusal(question.source, reply.epoch, reason, now):
                    self._logger.warning(
                        "source %s refuses to share KV: %s; its KV is recomputed instead", question.source, reason
                    )
        return answered

    def _count_unauthenticated(self) -> None:
        self.unauthenticated += 1
        if self.unauthenticated == 1:
            self._logger.warning("replies that no token fits are dropped: give all engines the same token file")

    def _give_up(self, question: Question) -> None:
        question.silent = True
        self.peers.note_silence(question.source, question.asked, time.monotonic())
        if any(other.source == question.source for other in self._open.values()):
            return  # they may be answered yet
        # What zmq has queued for the source is stale; a new connection also finds a source that restarted.
        socket = self._sockets.pop(question.source, None)
        if socket is not None:
            socket.close(0)


def _explain_version(refused: wire.Refused) -> str:
    return f"it speaks version {refused.version} of the protocol and this engine {wire.VERSION}"
