"""One run of the load against one target: what it took, what it cost, and what else went on meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.bench.router.bodies import build_body
from e2e.bench.router.cpu import TreeUsage, observe_busy_seconds, observe_usage
from e2e.bench.router.plan import BYTES_PER_TOKEN, Row
from e2e.bench.router.targets import DECODE, LOCAL, PREFILL, BenchError, Engines, Target, fetch
from e2e.bench.router.tools import Tools

SESSIONS: Final = 64
WARM_UP_SECONDS: Final = 0.2
"""Before every run: connections of routers that close idle ones early would otherwise count against them."""
TIMEOUT_SECONDS: Final = 30.0
CHAT: Final = "/v1/chat/completions"
_JSON: Final = {"content-type": "application/json"}


@dataclass(frozen=True)
class Load:
    """What the load program reports (times in microseconds)."""

    requests: int
    errors: int
    first_error: str
    seconds: float
    requests_per_second: float
    connect_us: float
    latency_us: Mapping[str, float | None]
    first_byte_us: Mapping[str, float | None]

    @staticmethod
    def parse(text: bytes) -> Load:
        """From its output."""
        values = json.loads(text)
        return Load(**{name: values[name] for name in Load.__dataclass_fields__})


@dataclass(frozen=True)
class Run:
    """A row, a target, a round."""

    row: str
    target: str
    round: int
    requests: int
    errors: int
    first_error: str
    requests_per_second: float
    latency_p50_us: float | None
    latency_p99_us: float | None
    first_byte_p50_us: float | None
    first_byte_p99_us: float | None
    connect_us: float
    cpu_us: float | None
    """Of the router's processes per request; None for the direct legs."""
    router_cores: float | None
    resident_bytes: int | None
    prefill_requests: int
    decode_requests: int
    prefill_bytes: float
    """Mean of the bodies that prefill got; 0 when it got none."""
    decode_bytes: float
    foreign_cores: float
    """What neither router, engines, load nor this process used, time stolen by the host included."""


class Bodies:
    """Request bodies, the answers that the engines give to them, as files for the load; made when first needed."""

    def __init__(self, engines: Engines, folder: Path, seed: int) -> None:
        self._engines, self._folder, self._seed = engines, folder, seed
        self._bodies: dict[tuple[int, bool], bytes] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, row: Row) -> tuple[Path, Path, Path]:
        """Set the engines for ``row``; files of the body, of decode's answer and of prefill's."""
        body = self._bodies.get((row.body_bytes, row.stream))
        if body is None:
            body = build_body(row.body_bytes, stream=row.stream, seed=self._seed)
            self._bodies[row.body_bytes, row.stream] = body
        self._engines.set(chunks=row.chunks, gap_us=row.gap_us, prompt_tokens=len(body) // BYTES_PER_TOKEN, spoil=0)
        name = row.name.replace(" ", "-").replace("=", "")
        files = tuple(self._folder / f"{name}.{kind}" for kind in ("body", "decode", "prefill"))
        contents = (body, self._ask(DECODE[0], body), self._ask(PREFILL[0], body))
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        return files[0], files[1], files[2]

    def _ask(self, host: str, body: bytes) -> bytes:
        status, answer = fetch(self._engines.address(host), CHAT, body, _JSON)
        if status != 200:
            raise BenchError(f"the mock engine answered {status} to a body of {len(body)} bytes")
        return answer


class Bench:
    """Runs the load."""

    def __init__(self, tools: Tools, engines: Engines, bodies: Bodies, core: int) -> None:
        self._tools, self._engines, self._bodies, self._core = tools, engines, bodies, core

    def run(self, row: Row, target: Target, number: int) -> Run:
        """Load the target for the row's time.

        Raises:
            BenchError: the load could not run.
        """
        body, expected, _ = self._bodies.prepare(row)
        self._load(target.address, body, expected, row.connections, seconds=WARM_UP_SECONDS)
        before = self._observe(target)
        load = self._load(target.address, body, expected, row.connections, seconds=row.seconds, ramp=row.ramp_seconds)
        return self._build_run(row, target, number, load, before, self._observe(target))

    def run_requests(self, row: Row, target: Target, requests: int, connections: int) -> Load:
        """A fixed number of requests; see :meth:`run`."""
        body, expected, _ = self._bodies.prepare(row)
        return self._load(target.address, body, expected, connections, requests=requests)

    def run_direct(self, row: Row, number: int) -> Run:
        """Both legs straight at the engines, one after the other; no router can beat the sum of their medians."""
        body, expected, prefill_answer = self._bodies.prepare(row)
        before = self._observe(None)
        legs = [
            self._load(self._engines.address(host), body, answer, row.connections, seconds=row.seconds / 2)
            for host, answer in ((PREFILL[0], prefill_answer), (DECODE[0], expected))
        ]
        after = self._observe(None)
        return Run(
            row=row.name,
            target="direct",
            round=number,
            requests=sum(leg.requests for leg in legs),
            errors=sum(leg.errors for leg in legs),
            first_error=next((leg.first_error for leg in legs if leg.first_error), ""),
            requests_per_second=1 / sum(1 / leg.requests_per_second for leg in legs if leg.requests_per_second),
            latency_p50_us=_add(legs[0].latency_us["p50"], legs[1].latency_us["p50"]),
            latency_p99_us=None,
            # Prefill's leg is over with its last byte, decode's counts up to its first.
            first_byte_p50_us=_add(legs[0].latency_us["p50"], legs[1].first_byte_us["p50"]),
            first_byte_p99_us=None,
            connect_us=max(leg.connect_us for leg in legs),
            cpu_us=None,
            router_cores=None,
            resident_bytes=None,
            prefill_requests=legs[0].requests,
            decode_requests=legs[1].requests,
            prefill_bytes=0,
            decode_bytes=0,
            foreign_cores=after.foreign_cores_since(before),
        )

    def _load(
        self,
        address: str,
        body: Path,
        expected: Path,
        connections: int,
        *,
        seconds: float = 0,
        requests: int = 0,
        ramp: float = 0,
    ) -> Load:
        amount = ["--requests", str(requests)] if requests else ["--seconds", str(seconds)]
        timeout = TIMEOUT_SECONDS if not requests else TIMEOUT_SECONDS + requests
        command = [
            *("taskset", "-c", str(self._core), str(self._tools.load), "--address", address),
            *("--body", str(body), "--expect", str(expected), "--connections", str(connections), *amount),
            *("--sessions", str(SESSIONS), "--ramp", str(ramp), "--timeout", str(timeout)),
        ]
        limit = seconds + 2 * timeout
        done = subprocess.run(command, capture_output=True, check=False, timeout=limit)
        if done.returncode != 0:
            raise BenchError(f"the load could not run: {done.stderr.decode(errors='replace').strip()}")
        return Load.parse(done.stdout)

    def _observe(self, target: Target | None) -> _Moment:
        usage = observe_usage(target.process.pid) if target is not None else TreeUsage(0, 0)
        engines = observe_usage(self._engines.process.pid).cpu_seconds
        ended = os.times()  # the load, waited for: in ticks of 10 ms
        own = ended.user + ended.system + ended.children_user + ended.children_system
        return _Moment(
            at=time.monotonic(),
            busy=observe_busy_seconds(),
            own=usage.cpu_seconds + engines + own,
            router=usage,
            prefill=self._engines.count(PREFILL),
            decode=self._engines.count(DECODE),
        )

    @staticmethod
    def _build_run(row: Row, target: Target, number: int, load: Load, before: _Moment, after: _Moment) -> Run:
        cpu = after.router.cpu_seconds - before.router.cpu_seconds
        prefill, decode = (
            (new[0] - old[0], new[1] - old[1])
            for new, old in ((after.prefill, before.prefill), (after.decode, before.decode))
        )
        return Run(
            row=row.name,
            target=target.name,
            round=number,
            requests=load.requests,
            errors=load.errors,
            first_error=load.first_error,
            requests_per_second=load.requests_per_second,
            latency_p50_us=load.latency_us["p50"],
            latency_p99_us=load.latency_us["p99"],
            first_byte_p50_us=load.first_byte_us["p50"],
            first_byte_p99_us=load.first_byte_us["p99"],
            connect_us=load.connect_us,
            cpu_us=cpu * 1e6 / load.requests if load.requests else None,
            router_cores=cpu / (after.at - before.at),
            resident_bytes=after.router.resident_bytes,
            prefill_requests=prefill[0],
            decode_requests=decode[0],
            prefill_bytes=prefill[1] / prefill[0] if prefill[0] else 0,
            decode_bytes=decode[1] / decode[0] if decode[0] else 0,
            foreign_cores=after.foreign_cores_since(before),
        )


@dataclass(frozen=True)
class _Moment:
    at: float
    busy: float
    own: float
    router: TreeUsage
    prefill: tuple[int, int]
    decode: tuple[int, int]

    def foreign_cores_since(self, before: _Moment) -> float:
        return max(0.0, (self.busy - before.busy) - (self.own - before.own)) / (self.at - before.at)


def explain_void(run: Run) -> str | None:
    """Why the run says nothing about its target, in one sentence; None when it counts."""
    if run.errors:
        return f"{run.errors} requests failed: {run.first_error}"
    if run.requests == 0:
        return "no request was completed"
    if run.decode_requests != run.requests and run.target != "direct":
        return f"decode got {run.decode_requests} requests instead of {run.requests}"
    if run.target not in (LOCAL, "direct") and run.prefill_requests != run.requests:
        return f"prefill got {run.prefill_requests} requests instead of {run.requests}: not the work of the others"
    return None


def compare_bodies(sent: bytes, received: bytes) -> dict[str, Any]:
    """What a router changed on the way to an engine: top-level keys and whether the messages are the same."""
    before, after = json.loads(sent), json.loads(received)
    return {
        "messages_equal": before["messages"] == after.get("messages"),
        "changed": sorted(key for key in before if key in after and before[key] != after[key]),
        "dropped": sorted(before.keys() - after.keys()),
        "added": sorted(after.keys() - before.keys()),
        "bytes": len(received),
    }


def _add(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right
