"""The set-ups that are compared: which engines each has, and how a turn passes through them.

Only one set-up runs at a time: the engines of the others are frozen (SIGSTOP). So an upstream decode engine that spins
for a pinned session, or any other idle cost, cannot disturb what is measured, and every turn is compared within minutes
of its counterparts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bidikv_runtime import contract
from e2e.bench.ask import (
    Answer,
    LeaveEarly,
    ask,
    build_body,
    build_prefill_body,
    difference,
    reset_prefix_cache,
    scrape,
)
from e2e.bench.authentication import write_token
from e2e.engine.client import Message, Metrics
from e2e.engine.local import LocalEngine

MONOLITH: Final = "monolith"
ONE_WAY: Final = "oneway"
STOCK: Final = "stock"
OURS: Final = "bidikv"
LOCAL_HIT: Final = "local_hit"
"""Not a set-up: the prefill leg of ``OURS`` while prefill itself still holds the history. The bound of all reuse."""
SETUPS: Final = (MONOLITH, ONE_WAY, STOCK, OURS)

MAXIMUM_LENGTH: Final = 32_768
POOL_BLOCKS: Final = 1200
"""38,400 tokens: the longest prompt of all, or a conversation and what is left of the one before."""
PIN_SECONDS: Final = 1800
"""Upstream's pins end after 480 s by default, which on two slow cores would be between two turns of a long run."""
EVICT_SECONDS: Final = 60.0
TTFT: Final = "vllm:time_to_first_token_seconds"
PARTS: Final = {
    "lookup": contract.METRIC_LOOKUP_SECONDS,
    "read and validation": contract.METRIC_READ_SECONDS,
    "validation": contract.METRIC_VALIDATE_SECONDS,
    "transfer": "vllm:nixl_xfer_time_seconds",
}
"""Histograms of an engine; upstream's connector has the last one only."""


@dataclass
class BenchEngine(LocalEngine):
    """An engine with any connector and its configuration."""

    transfer_config: dict[str, Any] | None = None
    """Replaces the product's configuration; ``connector_module`` is None then."""

    def command(self) -> list[str]:
        command = super().command()
        if self.transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer_config)]
        return command


def stock_config(role: str, *, bidirectional: bool, as_shipped: bool = False) -> dict[str, Any]:
    """Upstream's connector, whose handles the client passes on."""
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "bidirectional_kv_xfer": bidirectional,
            "decoder_kv_blocks_ttl": PIN_SECONDS,
        },
    }
    if not as_shipped:
        config["kv_connector_module_path"] = "e2e.bench.kv_stock_connector"
    return config


@dataclass(frozen=True)
class TurnTimes:
    """One turn of one set-up, in seconds."""

    prefill_s: float
    """The prefill leg as the client sees it; 0 without one."""
    ttft_s: float | None
    """From the start of the turn to the first token's arrival at the client; None where nothing can be streamed."""
    engine_ttft_s: float
    """The prefill leg, then the time to first token that the answering engine measured itself; in every set-up."""
    prompt_tokens: int
    prefill_local_tokens: int
    """Tokens of the prompt that prefill found in its own cache."""
    prefill_remote_tokens: int
    """Tokens of the prompt that prefill got from decode."""
    parts: dict[str, float]
    """What the engines say to have spent on reads, to see where the time goes."""
    answer: Answer


@dataclass
class Conversation:
    """The state of one conversation in one set-up."""

    name: str
    messages: list[Message] = field(default_factory=list)
    handle: dict[str, Any] | None = None
    """Upstream's: where decode has pinned the last turn."""


def describe_parts(role: str, before: Metrics, after: Metrics) -> dict[str, float]:
    """Seconds that an engine says to have spent on its reads in between, part by part; parts that it had none of are
    left out."""
    found = {f"{role}: {part}": difference(before, after, f"{name}_sum") for part, name in PARTS.items()}
    return {part: seconds for part, seconds in found.items() if seconds}


def count_cached(before: Metrics, after: Metrics) -> tuple[int, int]:
    """Prompt tokens in between that an engine found in its own cache, and at another engine."""
    local, remote = (difference(before, after, f"vllm:{kind}prefix_cache_hits_total") for kind in ("", "external_"))
    return int(local or 0), int(remote or 0)


async def observe_first_token(engine: LocalEngine, before: Metrics) -> tuple[float, Metrics]:
    """The engine's own time to first token of the one request since ``before``, and the scrape that has it."""
    for _ in range(100):
        after = await scrape(engine)
        if count := difference(before, after, f"{TTFT}_count"):
            if count == 1:
                return difference(before, after, f"{TTFT}_sum") or 0.0, after
            raise RuntimeError(f"{engine.name} counted {count:.0f} first tokens instead of 1: is it used by others?")
        await asyncio.sleep(0.02)
    raise RuntimeError(f"{engine.name} counted no first token of the last request")


@dataclass
class SetUp:
    """A monolith: one engine with a prefix cache. The others extend it."""

    name: str
    engines: list[BenchEngine]

    @property
    def decode(self) -> BenchEngine:
        """The engine that answers."""
        return self.engines[-1]

    def freeze(self) -> None:
        for engine in self.engines:
            engine.freeze()

    async def thaw(self) -> None:
        """Run again, and answer."""
        for engine in self.engines:
            engine.thaw()
        for engine in self.engines:
            await asyncio.to_thread(engine.wait_ready, 60.0)
            await scrape(engine)

    async def evict(self) -> None:
        """Make prefill forget the history. A monolith keeps it: that is what it is compared for."""

    async def turn(self, conversation: Conversation, answer_tokens: int) -> TurnTimes:
        """Answer ``conversation.messages``."""
        before = await scrape(self.decode)
        answer = await ask(self.decode, build_body(conversation.messages, answer_tokens), stream=True)
        engine_ttft, after = await observe_first_token(self.decode, before)
        local, remote = count_cached(before, after)
        return TurnTimes(0.0, answer.first_token_s, engine_ttft, answer.prompt_tokens, local, remote, {}, answer)

    async def end(self, conversation: Conversation) -> None:
        """Give back what the conversation still occupies."""


@dataclass
class Pair(SetUp):
    """A prefill engine and a decode engine. The subclasses say what their legs carry."""

    streams: bool = True

    @property
    def prefill(self) -> BenchEngine:
        return self.engines[0]

    def prefill_params(self, conversation: Conversation) -> dict[str, Any]:
        raise NotImplementedError

    def decode_params(self, conversation: Conversation, prefill: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def decode_headers(self) -> dict[str, str]:
        return {}

    async def evict(self) -> None:
        deadline = asyncio.get_running_loop().time() + EVICT_SECONDS
        while not await reset_prefix_cache(self.prefill):
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(
                    f"{self.prefill.name} kept blocks in use for {EVICT_SECONDS:.0f} s: it cannot forget"
                )
            await asyncio.sleep(0.2)

    async def prefill_leg(self, conversation: Conversation, params: dict[str, Any]) -> Answer:
        return await ask(self.prefill, build_prefill_body(conversation.messages), stream=False, kv_params=params)

    async def turn(self, conversation: Conversation, answer_tokens: int) -> TurnTimes:
        before_p, before_d = await scrape(self.prefill), await scrape(self.decode)
        prefill = await self.prefill_leg(conversation, self.prefill_params(conversation))
        body = build_body(conversation.messages, answer_tokens)
        params = self.decode_params(conversation, prefill)
        answer = await ask(self.decode, body, stream=self.streams, kv_params=params, headers=self.decode_headers())
        conversation.handle = answer.kv_transfer_params
        decode_ttft, after_d = await observe_first_token(self.decode, before_d)
        after_p = await scrape(self.prefill)
        local, remote = count_cached(before_p, after_p)
        return TurnTimes(
            prefill.total_s,
            prefill.total_s + answer.first_token_s if self.streams else None,
            prefill.total_s + decode_ttft,
            prefill.prompt_tokens,
            local,
            remote,
            describe_parts("prefill", before_p, after_p) | describe_parts("decode", before_d, after_d),
            answer,
        )


class StockPair(Pair):
    """Upstream's connector.

    One-way: the handle of prefill's blocks goes to decode. Bidirectional: decode's goes back at the next turn, and only
    an answer without a stream carries it.
    """

    def prefill_params(self, conversation: Conversation) -> dict[str, Any]:
        return conversation.handle or {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, conversation: Conversation, prefill: Answer) -> dict[str, Any]:
        if not prefill.kv_transfer_params:
            raise RuntimeError(f"{self.prefill.name} handed out no handle: is its connector the NIXL one?")
        return prefill.kv_transfer_params

    async def end(self, conversation: Conversation) -> None:
        """Release the last pin: prefill reads it, and decode reads prefill's blocks in a request that it aborts, which
        alone is not pinned again."""
        if conversation.handle is None:
            return
        prefill = await self.prefill_leg(conversation, self.prefill_params(conversation))
        try:
            await ask(
                self.decode,
                build_body(conversation.messages, 1000),
                stream=True,
                kv_params=self.decode_params(conversation, prefill),
                leave_after_events=1,
            )
        except LeaveEarly:
            conversation.handle = None


class OurPair(Pair):
    """The product's connector: each leg names the other engine as a source."""

    def prefill_params(self, conversation: Conversation) -> dict[str, Any]:
        return {
            contract.SOURCES_PARAM: [self.decode.source],
            contract.SESSION_PARAM: conversation.name,
            contract.EXPECT_PARAM: contract.EXPECT_RETURN,
            contract.HANDOVER_PARAM: True,
        }

    def decode_params(self, conversation: Conversation, prefill: Answer) -> dict[str, Any]:
        return {
            contract.SOURCES_PARAM: [self.prefill.source],
            contract.SESSION_PARAM: conversation.name,
            contract.EXPECT_PARAM: contract.EXPECT_RETURN,
            contract.PREFILLED_PARAM: prefill.prompt_tokens,
        }

    def decode_headers(self) -> dict[str, str]:
        return {contract.HANDOVER_HEADER: contract.HANDOVER_GUARDED}

    async def local_hit(self, conversation: Conversation) -> TurnTimes:
        """The prefill leg of ``conversation.messages`` when prefill holds all of them but the last."""
        await self.evict()
        history = Conversation(conversation.name, conversation.messages[:-1])
        if history.messages:
            await self.prefill_leg(history, self.prefill_params(history))
        before = await scrape(self.prefill)
        answer = await self.prefill_leg(conversation, {contract.SESSION_PARAM: conversation.name})
        local, remote = count_cached(before, await scrape(self.prefill))
        return TurnTimes(answer.total_s, None, answer.total_s, answer.prompt_tokens, local, remote, {}, answer)


def build_setups(names: Sequence[str], dtype: str, logs: Path, *, as_shipped: bool = False) -> list[SetUp]:
    """The set-ups named, not started. ``as_shipped`` leaves upstream's connector without ``kv_stock_connector``."""
    arguments = (
        *("--dtype", dtype, "--max-model-len", str(MAXIMUM_LENGTH)),
        *("--num-gpu-blocks-override", str(POOL_BLOCKS)),
        *("--hf-overrides", json.dumps({"max_position_embeddings": MAXIMUM_LENGTH})),
    )

    def engine(name: str, **options: Any) -> BenchEngine:
        return BenchEngine(name, logs / f"{dtype}-{name}.log", arguments=arguments, **options)

    def stock(name: str, *, bidirectional: bool) -> StockPair:
        p, d = (
            engine(
                f"{name}-{suffix}",
                connector_module=None,
                transfer_config=stock_config(role, bidirectional=bidirectional, as_shipped=as_shipped),
            )
            for suffix, role in (("p", "kv_producer"), ("d", "kv_consumer"))
        )
        return StockPair(name, [p, d], streams=not bidirectional)

    def build(name: str) -> SetUp:
        if name == MONOLITH:
            return SetUp(name, [engine(name, connector_module=None)])
        if name == OURS:
            environment = write_token(logs)
            return OurPair(name, [engine(f"{name}-{role}", environment=environment) for role in ("p", "d")])
        return stock(name, bidirectional=name == STOCK)

    return [build(name) for name in names]
