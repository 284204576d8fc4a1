"""The soak itself notices what it is for; played on engines that are made up."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from bidikv_runtime import contract
from e2e.bench.ask import Answer, EngineRefusal, LeaveEarly
from e2e.bench.soak import Soak
from e2e.bench.soak_fleet import Fleet, Outage
from e2e.bench.soak_report import Rest
from e2e.engine.client import Completion
from e2e.engine.local import LocalEngine

SECONDS = 1.0
SEED = 4


@dataclass
class MadeUpEngine:
    name: str

    @property
    def process_group(self) -> int:
        return os.getpgid(0)

    def log_end(self, lines: int) -> str:
        return f"{lines} lines of {self.name}"


def answer_to(body: dict[str, Any], token: int = 65) -> Answer:
    choice = Completion(chr(token) * 4, [token] * 4, [{chr(token): -0.1, "z": -4.0}] * 4, "length")
    return Answer([choice] * body.get("n", 1))


class MadeUpFleet(Fleet):
    """Answers every request at once; ``fault`` says what is wrong with the fifth."""

    def __init__(self, fault: str = "") -> None:
        p, d, m = (cast(LocalEngine, MadeUpEngine(name)) for name in ("P", "D", "M"))
        super().__init__(p, [d], m, 160)
        self.fault, self.asked, self.left = fault, 0, 0

    async def answer(self, session: str, body: dict[str, Any], *, stream: bool, **leave: Any) -> Answer:
        await asyncio.sleep(0.001)
        self.asked += 1
        if self.asked == 5:
            if self.fault == "error":
                raise EngineRefusal("D", 500, "made up")
            if self.fault == "hang":
                raise TimeoutError
            return answer_to(body, 66 if self.fault == "wrong" else 65)
        if any(value is not None for value in leave.values()):
            self.left += 1
            raise LeaveEarly
        return answer_to(body)

    async def reference(self, body: dict[str, Any], *, stream: bool) -> Answer:
        return Answer(answer_to(body).choices[:1])

    async def counters(self, engine: LocalEngine, names: Sequence[str]) -> dict[str, float]:
        return {contract.METRIC_REUSED_TOKENS: 0.0 if self.fault == "nothing reused" else 640.0}

    async def come_to_rest(self, engine: LocalEngine) -> Rest:
        return Rest(engine.name, True, 7 if self.fault == "leak" else 0, 0, self.fault != "leak")


async def play(fleet: MadeUpFleet, folder: Path) -> dict[str, Any]:
    return await Soak(fleet, SEED, SECONDS, lanes=8, folder=folder).run()


async def test_a_good_service_holds(tmp_path: Path) -> None:
    fleet = MadeUpFleet()
    result = await play(fleet, tmp_path)
    tally = result["tally"]
    assert result["faults"] == []
    assert tally["requests"] == fleet.asked >= 5
    assert tally["left"] == fleet.left
    assert tally["completed"] == fleet.asked - fleet.left
    assert tally["same"] == tally["compared"] >= tally["completed"]
    assert json.loads(json.dumps(result))["tally"]["errors"] == {}
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("fault", "word"),
    [("wrong", "differ"), ("hang", "hung"), ("error", "HTTP 500"), ("nothing reused", "reused"), ("leak", "7 blocks")],
)
async def test_each_fault_is_noticed(tmp_path: Path, fault: str, word: str) -> None:
    result = await play(MadeUpFleet(fault), tmp_path)
    assert any(word in found for found in result["faults"]), result["faults"]


async def test_a_wrong_answer_leaves_what_is_needed_to_ask_again(tmp_path: Path) -> None:
    await play(MadeUpFleet("wrong"), tmp_path)
    content = json.loads((tmp_path / "soak-wrong-1.json").read_text())
    assert content["seed"] == SEED
    assert content["body"]["messages"][-1]["role"] == "user"
    assert content["got"]["tokens"] != content["expected"]["tokens"]
    assert content["logs"]["P"] == "200 lines of P"


async def test_errors_during_an_outage_are_excused(tmp_path: Path) -> None:
    fleet = MadeUpFleet("error")
    fleet.was_down = lambda since: True  # type: ignore[method-assign]
    result = await play(fleet, tmp_path)
    assert result["faults"] == []
    assert result["tally"]["errors_while_down"] == {"HTTP 500": 1}


def test_an_outage_excuses_what_was_under_way_and_nothing_later() -> None:
    fleet = MadeUpFleet()
    fleet.outages.append(Outage("D", since=10.0, until=20.0))
    assert fleet.was_down(since=5.0)
    assert fleet.was_down(since=19.0)
    assert not fleet.was_down(since=21.0)
    fleet.outages.append(Outage("P", since=30.0))
    assert fleet.was_down(since=31.0)
    assert not fleet.is_up(fleet.prefill)
    assert fleet.is_up(fleet.decodes[0])
