"""The engines of the soak, and the router that it plays: which engine gets a turn, and what its legs carry."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from bidikv_runtime import contract
from e2e.bench.ask import (
    Answer,
    EngineRefusal,
    LeaveEarly,
    ask,
    build_body,
    build_prefill_body,
    reset_prefix_cache,
    scrape,
)
from e2e.bench.processes import Guard
from e2e.bench.soak_report import Rest
from e2e.engine.client import Message
from e2e.engine.local import LocalEngine

LEG_SECONDS: Final = 150.0
"""A leg that takes longer counts as hung: the longest freeze, two restarts' worth of busy cores and the work itself."""
REST_SECONDS: Final = 90.0


class Down(Exception):
    """No engine of a role is up."""


@dataclass
class Outage:
    """From the kill of an engine to its first health check; ``until`` is infinite while it lasts."""

    engine: str
    since: float
    until: float = float("inf")


@dataclass
class Fleet:
    """One prefill engine, decode engines, and a monolith that is left in peace. Times are of ``time.monotonic``."""

    prefill: LocalEngine
    decodes: Sequence[LocalEngine]
    monolith: LocalEngine
    pool_blocks: int
    guard: Guard = lambda group: None
    """Told of every process group that is started here."""
    outages: list[Outage] = field(default_factory=list)
    prefilled_again: int = 0

    @property
    def disturbed(self) -> list[LocalEngine]:
        """All engines that may be killed and frozen."""
        return [self.prefill, *self.decodes]

    def is_up(self, engine: LocalEngine) -> bool:
        return not any(o.engine == engine.name and o.until == float("inf") for o in self.outages)

    def was_down(self, since: float) -> bool:
        """Whether any engine was down at a moment since then: that excuses an error."""
        return any(outage.until >= since for outage in self.outages)

    def rank(self, session: str) -> list[LocalEngine]:
        """Decode engines in the order in which the session prefers them, those that are down last."""

        def key(engine: LocalEngine) -> tuple[bool, bytes]:
            return not self.is_up(engine), hashlib.sha256(f"{session}/{engine.name}".encode()).digest()

        return sorted(self.decodes, key=key)

    async def wait_up(self, deadline: float) -> None:
        """Until prefill and a decode engine are up.

        Raises:
            Down: they are not by the deadline.
        """
        while not (self.is_up(self.prefill) and any(map(self.is_up, self.decodes))):
            if time.monotonic() > deadline:
                raise Down("prefill or decode is down")
            await asyncio.sleep(0.1)

    async def prefill_leg(self, session: str, messages: Sequence[Message], parameters: dict[str, Any]) -> int:
        """Prompt tokens that prefill says to have computed."""
        params = {
            contract.SOURCES_PARAM: [engine.source for engine in self.rank(session)],
            contract.SESSION_PARAM: session,
            contract.EXPECT_PARAM: contract.EXPECT_RETURN,
            contract.HANDOVER_PARAM: True,
        }
        body = build_prefill_body(messages, **parameters)
        answer = await ask(self.prefill, body, stream=False, kv_params=params, seconds=LEG_SECONDS)
        return answer.prompt_tokens

    async def decode_leg(
        self,
        session: str,
        body: dict[str, Any],
        prefilled: int | None,
        *,
        stream: bool,
        leave_after_events: int | None,
    ) -> Answer:
        """``prefilled`` guards the leg: decode refuses it when it finds far less; None takes whatever it finds."""
        params: dict[str, Any] = {
            contract.SOURCES_PARAM: [self.prefill.source],
            contract.SESSION_PARAM: session,
            contract.EXPECT_PARAM: contract.EXPECT_RETURN,
        }
        headers = {}
        if prefilled is not None:
            params[contract.PREFILLED_PARAM] = prefilled
            headers[contract.HANDOVER_HEADER] = contract.HANDOVER_GUARDED
        return await ask(
            self.rank(session)[0],
            body,
            stream=stream,
            kv_params=params,
            headers=headers,
            leave_after_events=leave_after_events,
            seconds=LEG_SECONDS,
        )

    async def answer(
        self,
        session: str,
        body: dict[str, Any],
        *,
        stream: bool,
        leave_prefill_after: float | None = None,
        leave_after_events: int | None = None,
    ) -> Answer:
        """One turn: prefill, then decode; both once more, unguarded, when decode does not find what prefill computed.

        Raises:
            LeaveEarly: the client left, ``leave_prefill_after`` seconds into a prefill leg or as ``ask`` does it.
            TimeoutError: a leg hung.
            EngineRefusal, aiohttp.ClientError: as ``ask`` does.
        """
        salt = {key: body[key] for key in ("cache_salt",) if key in body}
        for guarded in (True, False):
            try:
                async with asyncio.timeout(leave_prefill_after) as leaving:
                    prefilled = await self.prefill_leg(session, body["messages"], salt)
            except TimeoutError:
                if leaving.expired():
                    raise LeaveEarly from None
                raise
            try:
                return await self.decode_leg(
                    session,
                    body,
                    prefilled if guarded else None,
                    stream=stream,
                    leave_after_events=leave_after_events,
                )
            except EngineRefusal as refusal:
                if not guarded or contract.HANDOVER_LOST not in refusal.text:
                    raise
                self.prefilled_again += 1
        raise AssertionError("the unguarded attempt returns or raises")

    async def reference(self, body: dict[str, Any], *, stream: bool) -> Answer:
        """The monolith's answer to the same request: one greedy choice, no tenant."""
        plain = {k: v for k, v in body.items() if k not in ("n", "top_k", "cache_salt")} | {"temperature": 0}
        return await ask(self.monolith, plain, stream=stream, seconds=LEG_SECONDS)

    async def kill(self, engine: LocalEngine) -> None:
        """Kill and restart; returns when the engine answers again."""
        outage = Outage(engine.name, time.monotonic())
        self.outages.append(outage)
        await asyncio.to_thread(engine.kill)
        await asyncio.to_thread(engine.start)
        self.guard(engine.process_group)
        await asyncio.to_thread(engine.wait_ready)
        outage.until = time.monotonic()

    async def freeze(self, engine: LocalEngine, seconds: float) -> None:
        engine.freeze()
        try:
            await asyncio.sleep(seconds)
        finally:
            engine.thaw()

    async def evict(self, engine: LocalEngine, text: str) -> None:
        """Two prompts that take the whole pool between them, halves of ``text``."""
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            await ask(engine, build_body([{"role": "user", "content": half}], 1), stream=False, seconds=LEG_SECONDS)

    async def reset(self, engine: LocalEngine) -> bool:
        """Ask the engine to empty its prefix cache; whether it did."""
        return await reset_prefix_cache(engine)

    async def counters(self, engine: LocalEngine, names: Sequence[str]) -> dict[str, float]:
        """The engine's metrics of these names, as ``name`` and, by labels, ``name{reason=silent}``."""
        metrics = await scrape(engine)
        found = {}
        for name in names:
            if parts := metrics.split(name):
                found[name] = sum(parts.values())
                found |= {f"{name}{{{labels}}}": value for labels, value in parts.items() if labels}
        return found

    async def come_to_rest(self, engine: LocalEngine) -> Rest:
        """Wait until nothing is in use and nothing is in quarantine, and say what is left at the deadline."""
        try:
            return await self._come_to_rest(engine)
        except (EngineRefusal, aiohttp.ClientError, OSError, TimeoutError):
            return Rest(engine.name, False, 0, None, False)

    async def _come_to_rest(self, engine: LocalEngine) -> Rest:
        # Metrics travel with engine steps, so each look is preceded by a request of one token.
        deadline = time.monotonic() + REST_SECONDS
        while True:
            body = build_prefill_body([{"role": "user", "content": "rest"}])
            await ask(engine, body, stream=False, seconds=LEG_SECONDS)
            await asyncio.sleep(1.0)
            found = await self.counters(engine, ["vllm:kv_cache_usage_perc", contract.METRIC_QUARANTINED_BLOCKS])
            leaked = round(found["vllm:kv_cache_usage_perc"] * self.pool_blocks)
            quarantined = found.get(contract.METRIC_QUARANTINED_BLOCKS)
            rest = Rest(
                engine.name,
                True,
                leaked,
                None if quarantined is None else round(quarantined),
                await reset_prefix_cache(engine),
            )
            at_rest = not leaked and not quarantined and rest.cache_reset
            if at_rest or time.monotonic() > deadline:
                return rest


def describe_error(error: BaseException) -> str:
    """A kind that counts can be kept by."""
    if isinstance(error, EngineRefusal):
        return f"HTTP {error.status}"
    if isinstance(error, aiohttp.ClientError):
        return f"connection: {type(error).__name__}"
    return type(error).__name__
