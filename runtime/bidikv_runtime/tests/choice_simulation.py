"""A deterministic simulation of router replicas in front of decode engines, in virtual time.

What is real: the fleets, one per replica. What is modelled: engines that answer after a fixed time and report once a
second, each replica's polls at moments of its own; sessions of Zipf popularity with Poisson arrivals.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from bidikv_runtime.contract import EngineReport, SessionReport
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.choice_rig import CONFIG, decode, prefill, sessions

REPORT_SECONDS = 1.0
TURN_TOKENS, TURN_BYTES = 1000, 4000


@dataclass
class SimulatedEngine:
    """Counts its requests, and remembers the sessions that it answered."""

    endpoint: Endpoint
    requests: int = 0
    held: dict[bytes, int] = field(default_factory=dict)
    """Session -> turns that ended here, up to its last one."""
    load_seconds: float = 0.0
    """Integral of ``requests`` over the time that is measured."""
    peak: int = 0

    def report(self) -> EngineReport:
        turns = tuple(
            SessionReport(
                session.hex(), count * TURN_TOKENS, count * TURN_TOKENS, count * TURN_TOKENS, count * TURN_BYTES
            )
            for session, count in self.held.items()
        )
        return EngineReport(self.endpoint.address, "1", 1, "a", self.requests, 0, 0.0, 1.0, turns)


@dataclass
class Simulation:
    """Replicas, engines and what happened."""

    engines: int
    replicas: int
    arrivals_per_second: float
    session_count: int = 400
    zipf: float = 1.1
    prefill_seconds: float = 0.5
    decode_seconds: float = 8.0
    seed: int = 1
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 0.0
        self.measured_since = 0.0
        self.fleets: list[Fleet] = []
        self.decodes = {e.endpoint.address: e for e in (SimulatedEngine(decode(n)) for n in range(1, self.engines + 1))}
        self.turns: dict[bytes, int] = defaultdict(int)
        self.at: dict[bytes, str] = {}
        """Where a session's last turn was answered."""
        self.later_turns = self.kept = 0
        """Turns of sessions that were answered before; of these, the ones at an engine with the last turn's KV."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        keys = sessions(self.session_count)
        weights = [1 / (rank + 1) ** self.zipf for rank in range(self.session_count)]
        self._draw: Callable[[], bytes] = lambda: self.random.choices(keys, weights)[0]
        self.fleets.extend(self.build_fleet() for _ in range(self.replicas))
        for address in self.decodes:
            self._begin_polls(address)
        self._arrive_forever()

    @property
    def pools(self) -> Pools:
        return Pools((prefill(1), prefill(2)), tuple(engine.endpoint for engine in self.decodes.values()))

    def build_fleet(self) -> Fleet:
        """A replica that has just started: it has a snapshot and the first reports, and no memory."""
        fleet = Fleet(lambda: self.now, self.limits, CONFIG, random.Random(self.random.random()))
        fleet.replace(self.pools)
        for address, engine in self.decodes.items():
            fleet.take_report(address, engine.report())
        return fleet

    def add_engine(self) -> SimulatedEngine:
        """Scale up by one."""
        engine = SimulatedEngine(decode(len(self.decodes) + 1))
        self.decodes[engine.endpoint.address] = engine
        for fleet in self.fleets:
            fleet.replace(self.pools)
        self._begin_polls(engine.endpoint.address)
        return engine

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            moment, _, action = heapq.heappop(self._events)
            self._pass(moment)
            action()
        self._pass(end)

    def measure(self) -> None:
        """Begin to measure anew."""
        self.measured_since, self.later_turns, self.kept = self.now, 0, 0
        for engine in self.decodes.values():
            engine.load_seconds, engine.peak = 0.0, engine.requests

    @property
    def imbalance(self) -> float:
        """Largest over mean of the engines' average loads."""
        loads = [engine.load_seconds for engine in self.decodes.values()]
        return max(loads) / (sum(loads) / len(loads))

    @property
    def affinity(self) -> float:
        return self.kept / self.later_turns

    def _pass(self, moment: float) -> None:
        for engine in self.decodes.values():
            engine.load_seconds += engine.requests * (moment - self.now)
        self.now = moment

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def _begin_polls(self, address: str) -> None:
        for replica in range(self.replicas):
            self._after(self.random.uniform(0, REPORT_SECONDS), partial(self._poll_forever, replica, address))

    def _poll_forever(self, replica: int, address: str) -> None:
        self.fleets[replica].take_report(address, self.decodes[address].report())
        self._after(REPORT_SECONDS * self.random.uniform(0.9, 1.1), partial(self._poll_forever, replica, address))

    def _arrive_forever(self) -> None:
        self._serve(self._draw(), self.fleets[self.random.randrange(len(self.fleets))])
        self._after(self.random.expovariate(self.arrivals_per_second), self._arrive_forever)

    def _serve(self, session: bytes, fleet: Fleet) -> None:
        endpoint = fleet.choose_decode(session)[0]
        engine = self.decodes[endpoint.address]
        if session in self.at:
            self.later_turns += 1
            self.kept += engine.held.get(session, 0) > 0
        work = fleet.decoding(endpoint)

        def begin() -> None:
            work.send()
            engine.requests += 1
            engine.peak = max(engine.peak, engine.requests)
            self._after(self.decode_seconds, end)

        def end() -> None:
            work.end()
            engine.requests -= 1
            self.turns[session] += 1
            engine.held[session] = self.turns[session]
            self.at[session] = endpoint.address
            fleet.note_turn(session, endpoint, TURN_BYTES * self.turns[session], TURN_TOKENS * self.turns[session])

        self._after(self.prefill_seconds, begin)
