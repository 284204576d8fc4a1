"""Random work for two shadow engines that read from each other, with everything vLLM allows happening in between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bidikv_runtime import contract
from e2e.engine.shadow import BLOCK, VOCABULARY, Prompt, ShadowEngine, Turn, Weights

DRAIN_STEPS = 10_000
"""Far more than the work of a scenario needs: an engine that is not idle by then hangs."""
LONGEST_PROMPT = 44
"""Of the 64 tokens that an engine takes."""
ADAPTERS = (None, None, None, "adapter")
SALTS = (None, None, None, "tenant-a", "tenant-b")


class Scenario:
    """``run`` takes a number of random actions, checking every engine after each, then lets all work end."""

    def __init__(
        self,
        *,
        asynchronous: bool,
        drafts: bool = False,
        policy: str = "fcfs",
        blocks: int = 24,
        weights_change: bool = False,
        **options: Any,
    ) -> None:
        self.weights_change = weights_change
        self.engines: dict[str, ShadowEngine] = {}
        self.weights = Weights()
        self.random = random.Random(0)
        self.pair = [
            ShadowEngine(
                name,
                self.engines,
                self.weights,
                asynchronous=asynchronous,
                drafts=drafts,
                policy=policy,
                blocks=blocks,
                choose=lambda bound: self.random.randrange(bound),
                **options,
            )
            for name in ("left", "right")
        ]
        self.histories: list[Prompt] = []
        self.prefilled: dict[str, list[Prompt]] = {}
        """Prompts that an engine has computed and another one is to decode, by engine."""

    def run(self, source_of_chance: random.Random, actions: int) -> None:
        self.random = source_of_chance
        self.histories = [Prompt(tuple((7 * i + j) % VOCABULARY for j in range(24))) for i in range(2)]
        self.prefilled = {engine.name: [] for engine in self.pair}
        if self.weights_change:
            self.change_weights(self.pair)
        for _ in range(actions):
            self.act()
            for engine in self.pair:
                engine.check()
        self.drain()

    def act(self) -> None:
        """One random action of one engine, its readers or its clients."""
        chance = self.random
        engine = chance.choice(self.pair)
        kind = chance.randrange(24)
        live = [turn for turn in engine.turns.values() if not turn.finished]
        if kind == 0 and live:
            engine.abort(chance.choice(live))
        elif kind == 1 and chance.randrange(3) == 0 and (engine.asynchronous or not engine.steps):
            engine.reset(running=chance.randrange(3) == 0)  # vLLM's engine core takes no calls within a step
        elif kind == 2 and self.weights_change and chance.randrange(6) == 0:
            self.change_weights([engine] if chance.randrange(4) == 0 else self.pair)
        elif kind <= 4 and len(live) < 5:
            self.send(engine)
        elif kind == 5 and len(live) < 5:
            self.decode(engine)
        elif kind <= 11 and engine.reads:
            self.read(engine, chance.choice(list(engine.reads)))
        elif kind == 12 and engine.abandoned:
            engine.end_abandoned(chance.choice(list(engine.abandoned)))
        else:
            self.step(engine)

    def send(self, engine: ShadowEngine) -> None:
        chance = self.random
        prompt = chance.choice(self.histories)
        if chance.randrange(3) == 0:  # an edited or shortened history, or another tenant's
            prompt = Prompt(
                prompt.tokens[: chance.randrange(1, len(prompt.tokens) + 1)],
                salt=chance.choice(SALTS),
                adapter=chance.choice(ADAPTERS),
            )
            if len(prompt.tokens) >= BLOCK and chance.randrange(8) == 0:
                prompt = replace(prompt, image=("image", 2))
        prompt = prompt.followed_by([chance.randrange(VOCABULARY) for _ in range(chance.randrange(8))])
        if len(prompt.tokens) > LONGEST_PROMPT:
            prompt = replace(prompt, tokens=prompt.tokens[:LONGEST_PROMPT])
        hints: dict[str, Any] = {}
        if chance.randrange(2):
            hints[contract.SESSION_PARAM] = f"session-{chance.randrange(3)}"
            hints[contract.EXPECT_PARAM] = chance.choice([contract.EXPECT_RETURN, contract.EXPECT_OVER])
        prefill = chance.randrange(3) == 0
        if prefill:
            hints[contract.HANDOVER_PARAM] = True
        elif chance.randrange(8) == 0:
            hints[contract.PREFILLED_PARAM] = chance.randrange(2 * len(prompt.tokens))
        elif chance.randrange(8) == 0:
            hints[contract.COMPUTE_LIMIT_PARAM] = chance.randrange(2 * len(prompt.tokens))
        for _ in range(2 if chance.randrange(6) == 0 else 1):  # two choices of one request are two requests to vLLM
            engine.send(
                prompt,
                1 if prefill else chance.randrange(1, 13),
                [other.source for other in self.pair if other is not engine],
                prompt_logprobs=chance.randrange(10) == 0,
                priority=chance.randrange(3),
                parameters=hints,
            )

    def decode(self, engine: ShadowEngine) -> None:
        """The second leg of a request whose prompt another engine has computed."""
        for other in self.pair:
            if other is not engine and self.prefilled[other.name]:
                prompt = self.prefilled[other.name].pop()
                hints = {contract.PREFILLED_PARAM: len(prompt.tokens)}
                engine.send(prompt, self.random.randrange(1, 13), [other.source], parameters=hints)

    def change_weights(self, changing: Sequence[ShadowEngine]) -> None:
        """Of all engines, to the same, or of one, to weights without a name."""
        if any(engine.steps and not engine.asynchronous for engine in changing):
            return  # vLLM's engine core takes no calls within a step
        version = max(engine.weights.version for engine in self.pair)
        for engine in changing:
            engine.weights = Weights(version)
            engine.change_weights(f"version {version + 1}" if len(changing) > 1 else None)
        for engine in self.pair:
            engine.forget_refusals()

    def read(self, engine: ShadowEngine, request_id: str) -> None:
        fate = self.random.randrange(24)
        if engine.may_validate(request_id):
            engine.validate(request_id)
        elif fate == 0:
            engine.fail(request_id)
        elif fate == 1:
            engine.abandon(request_id)
        else:
            engine.copy(request_id, self.random.randrange(1, 25))

    def step(self, engine: ShadowEngine) -> None:
        possible = [
            action
            for action, may in (
                (engine.schedule, engine.may_schedule),
                (engine.execute, engine.may_execute),
                (engine.process, engine.may_process),
            )
            if may
        ]
        if possible:
            self.random.choice(possible)()
        for turn in list(engine.turns.values()):
            if turn.finished and turn.answer:
                self.judge(turn)
                if (turn.request.kv_transfer_params or {}).get(contract.HANDOVER_PARAM):
                    self.prefilled[engine.name].append(turn.prompt)
                self.histories = [*self.histories[-5:], turn.prompt.followed_by(turn.answer)]
                del engine.turns[turn.request.request_id]

    def judge(self, turn: Turn) -> None:
        """The answer is what an engine that reuses nothing would have said."""
        if self.weights_change:
            return  # vLLM goes on with KV of two models
        assert turn.answer == turn.weights.continue_(turn.prompt, len(turn.answer)), turn.request.request_id

    def drain(self) -> None:
        """Let all reads and requests end; the engines are then as new."""
        for _ in range(DRAIN_STEPS):
            busy = [engine for engine in self.pair if not engine.idle]
            if not busy:
                break
            for engine in busy:
                for request_id in list(engine.reads):
                    self.read(engine, request_id)
                for request_id in list(engine.abandoned):
                    engine.end_abandoned(request_id)
                self.step(engine)
                engine.check()
        for engine in self.pair:
            assert engine.idle, f"{engine.name} hangs: {list(engine.scheduler.requests)}"
            engine.check_idle()
            engine.turns.clear()
            assert engine.reset(running=False)
            engine.truth.clear()

    def stop(self) -> None:
        for engine in self.pair:
            engine.stop()
