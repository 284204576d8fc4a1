"""What this engine remembers of other engines: which of them are silent, fail or refuse, and until when to leave them.

A period of silence doubles with each further one, so a source that is gone for good costs a deadline now and then and
not one per request; any answer ends the doubling. Failed reads are counted apart: a source may answer lookups and
still not be readable. Addresses come from requests, so what is kept is bounded; what was noted longest ago goes first.

Pure: the caller passes the time (``time.monotonic``). May be read by another thread (``describe``).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from bidikv_runtime.contract import REACH_SECONDS

MAXIMUM_PEERS: Final = 256
REFUSAL_PERIOD: Final = 30.0
"""Seconds for which a source that refused is not asked: what differs ends with a restart of one of the two engines."""
NEVER: Final = float("-inf")
SILENT_SECONDS: Final = 30.0
"""A peer counts as unreachable when nothing has worked for so long: busy machines miss a deadline now and then."""


@dataclass
class _Peer:
    silences: int = 0
    failures: int = 0
    silent_until: float = NEVER
    avoided_until: float = NEVER
    refused_until: float = NEVER
    refusal: str = ""
    refused_epoch: int = -1
    noted: float = NEVER
    """When the last silence was counted: questions sent before say nothing new."""
    silent_since: float = NEVER
    """When the question was sent that began the present run of silences."""
    failed: float = NEVER
    """When the last failed read was counted."""
    failing_since: float = NEVER
    answered: float = NEVER

    def unreachable_since(self, now: float) -> float | None:
        """When the attempts began that were all in vain: at least two, spread over ``SILENT_SECONDS``, the last one
        recently. None if there are no such."""
        runs = (
            (self.silences, self.silent_since, self.noted),
            (self.failures, self.failing_since, self.failed),
        )
        return min(
            (
                first
                for times, first, last in runs
                if times >= 2 and last - first >= SILENT_SECONDS and now - last < REACH_SECONDS
            ),
            default=None,
        )

    def is_reached(self, now: float) -> bool:
        """Whether it has answered recently, and since the last silence."""
        return self.silences == 0 and now - self.answered < REACH_SECONDS


class Peers:
    def __init__(self, period: float, maximum: float) -> None:
        """The first silence leaves a source alone for ``period`` seconds, each further one twice as long as the one
        before, up to ``maximum``."""
        self._period, self._maximum = period, max(period, maximum)
        self._peers: dict[Hashable, _Peer] = {}
        self._lock = threading.Lock()

    def is_silent(self, source: Hashable, now: float) -> bool:
        """Whether the source missed a deadline, or reads from it failed, and its time is not over."""
        peer = self._peers.get(source)
        return peer is not None and now < max(peer.silent_until, peer.avoided_until)

    def is_refused(self, source: Hashable, now: float) -> bool:
        """Whether the source refused to exchange KV a short while ago."""
        peer = self._peers.get(source)
        return peer is not None and now < peer.refused_until

    def note_silence(self, source: Hashable, asked: float, now: float) -> None:
        """A question sent at ``asked`` has had no answer by its deadline. Several questions that were open together
        count as one silence, and none counts when the source has answered a later one."""
        with self._lock:
            peer = self._touch(source)
            if asked < peer.noted or asked < peer.answered:
                return
            if peer.silences == 0:
                peer.silent_since = asked
            peer.silences += 1
            peer.noted = now
            peer.silent_until = now + self._backoff(peer.silences)

    def note_answer(self, source: Hashable, now: float) -> None:
        """The source has answered something."""
        with self._lock:
            peer = self._touch(source)
            peer.silences, peer.silent_until, peer.answered = 0, NEVER, now

    def note_failure(self, source: Hashable, now: float) -> None:
        """A read from the source failed, although it may answer questions."""
        with self._lock:
            peer = self._touch(source)
            if now < peer.avoided_until:
                return  # another read that was under way with the first
            if now >= peer.avoided_until + self._maximum:
                peer.failures = 0
            if peer.failures == 0:
                peer.failing_since = now
            peer.failures += 1
            peer.failed = now
            peer.avoided_until = now + self._backoff(peer.failures)

    def note_success(self, source: Hashable) -> None:
        """A read from the source was valid."""
        peer = self._peers.get(source)
        if peer is not None:
            peer.failures, peer.avoided_until = 0, NEVER

    def forget_refusals(self) -> None:
        """This engine is another than the one that was refused."""
        with self._lock:
            for peer in self._peers.values():
                peer.refused_until = NEVER

    def note_refusal(self, source: Hashable, epoch: int, reason: str, now: float) -> bool:
        """The source's process ``epoch`` refuses; returns whether that is new, hence worth a line in the log."""
        with self._lock:
            peer = self._touch(source)
            new = (peer.refused_epoch, peer.refusal) != (epoch, reason)
            peer.refused_epoch, peer.refusal, peer.refused_until = epoch, reason, now + REFUSAL_PERIOD
            return new

    def judge(self, now: float) -> tuple[list[Hashable], list[Hashable]]:
        """The sources of the last minutes that cannot be reached, longest unreachable first, and those that can."""
        with self._lock:
            peers = list(self._peers.items())
        since = [(peer.unreachable_since(now), source, peer) for source, peer in peers]
        unreachable = sorted(((first, source) for first, source, _ in since if first is not None), key=itemgetter(0))
        reached = [source for first, source, peer in since if first is None and peer.is_reached(now)]
        return [source for _, source in unreachable], reached

    def describe(self, now: float) -> list[dict[str, Any]]:
        """One entry for each source that is remembered, the latest heard of last."""
        with self._lock:
            return [
                {
                    "source": str(source),
                    "silences": peer.silences,
                    "silent_seconds_left": _left(peer.silent_until, now),
                    "failed_reads": peer.failures,
                    "avoided_seconds_left": _left(peer.avoided_until, now),
                    "refusal": peer.refusal if now < peer.refused_until else "",
                }
                for source, peer in self._peers.items()
            ]

    def _touch(self, source: Hashable) -> _Peer:
        peer = self._peers.pop(source, None) or _Peer()
        while len(self._peers) >= MAXIMUM_PEERS:
            del self._peers[next(iter(self._peers))]
        self._peers[source] = peer
        return peer

    def _backoff(self, times: int) -> float:
        return min(self._maximum, self._period * 2.0 ** min(times - 1, 60))


def _left(until: float, now: float) -> float:
    return round(max(0.0, until - now), 3)
