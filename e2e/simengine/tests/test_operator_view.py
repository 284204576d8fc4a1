"""What the operator learns of engines by asking them: the product's poller, store and verdicts on simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.engines.facts import Expectation, FactStore
from bidikv_operator.engines.poll import EnginePoller
from bidikv_operator.engines.targets import Target
from bidikv_operator.engines.value import compute_session_value
from bidikv_operator.kinds import INFERENCE
from bidikv_operator.names import Role
from bidikv_operator.resolved import ResolvedFabric
from bidikv_operator.state import EngineFacts
from bidikv_operator.status.conditions import Condition
from bidikv_operator.status.reuse import compute_reuse
from bidikv_operator.status.transport import compute_transport, compute_transport_facts
from bidikv_runtime import contract
from e2e.simengine.local import HOST, SERVED_MODEL, SimulatedEngine, running

KEY = Key("team", "chat")
WAIT_SECONDS = 60.0
TOKEN = "token-of-all-engines"
MESSAGES = [{"role": "user", "content": "A question that fills many blocks of the cache. " * 60}]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(TOKEN + "\n")
    return path


def make_engine(name: str, folder: Path, token_file: Path, **changes: Any) -> SimulatedEngine:
    environment = {contract.ENV_TOKEN_FILE: str(token_file)}
    settings = {"bidikv_cost_model": "AlwaysPull", **changes.pop("settings", {})}
    return SimulatedEngine(name, folder / f"{name}.log", settings=settings, environment=environment, **changes)


class View:
    """The operator's side: engines are found by name instead of in pods."""

    def __init__(self, engines: Mapping[str, SimulatedEngine], fabric: ResolvedFabric, token: str) -> None:
        self._engines, self.fabric = engines, fabric
        self.cache, self.store, self.named = ObjectCache(), FactStore(choose=self._choose), list[Key]()
        self.refused: list[Key] = []
        metadata = {"namespace": KEY.namespace, "name": KEY.name, "uid": "u", "resourceVersion": "1"}
        self.cache.put(INFERENCE, {"metadata": metadata, "spec": {}})
        self.store.expect(KEY, Expectation({}, fabric, unreachable_seconds=0.001))
        self.poller = EnginePoller(
            self.store,
            self.cache,
            self.named.append,
            lambda key: token,
            period_seconds=0.1,
            on_refused=self.refused.append,
        )

    def _choose(self, pods: Iterable[Mapping[str, Any]], ranks: Mapping[Role, int]) -> tuple[Target, ...]:
        roles: dict[str, Role] = {"p": names.PREFILL, "d": names.DECODE}
        return tuple(
            Target(name, name, roles[name[0]], HOST, 0, engine.lookup_port, engine.state_port)
            for name, engine in self._engines.items()
        )

    @property
    def facts(self) -> tuple[EngineFacts, ...]:
        return self.store.observe(KEY, ())

    @property
    def transport(self) -> Condition:
        return compute_transport(self.facts, self.fabric, None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():  # noqa: ASYNC110 -- the poller tells nobody
                await asyncio.sleep(0.02)

    async def all_told(self) -> None:
        await self.until(lambda: all(one.report is not None for one in self.facts))


@asynccontextmanager
async def polling(
    engines: Mapping[str, SimulatedEngine], fabric: ResolvedFabric, token: str = TOKEN
) -> AsyncIterator[View]:
    view = View(engines, fabric, token)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(view.poller.run())
        yield view
        task.cancel()


async def ask(engine: SimulatedEngine, **params: Any) -> None:
    """One turn of an engine, as the router's leg to it."""
    body = {"model": SERVED_MODEL, "messages": MESSAGES, "max_tokens": 4, contract.KV_TRANSFER_PARAMS: params}
    async with aiohttp.ClientSession(engine.url) as http, http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()


def source(engine: SimulatedEngine) -> str:
    return f"{HOST}:{engine.lookup_port}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[dict[str, SimulatedEngine]]:
    folder = tmp_path_factory.mktemp("pair")
    simulation = {"read_bytes_per_second": 2.5e9}
    engines = {name: make_engine(name, folder, token_file, simulation=simulation) for name in ("p", "d")}
    with running(*engines.values()):
        yield engines


async def test_the_transport_is_verified_by_the_first_turn_that_needs_it(pair: dict[str, SimulatedEngine]) -> None:
    p, d = pair["p"], pair["d"]
    async with polling(pair, ResolvedFabric(type="TCP")) as view:
        await view.all_told()
        assert (view.transport.status, view.transport.reason) == ("Unknown", "NoTraffic")
        await ask(p, **{contract.HANDOVER_PARAM: True})
        await ask(d, **{contract.SOURCES_PARAM: [source(p)], contract.SESSION_PARAM: "s"})
        await view.until(lambda: view.transport.status == "True")
        assert "UCX over tcp, at about 20 Gb/s" in view.transport.message
        facts = compute_transport_facts(view.facts, None)
        assert facts == {"backend": "UCX", "provider": "tcp", "gigabitsPerSecond": 20}
        await view.until(lambda: compute_reuse(view.facts, None) == {"sessions": 1})
        reports = {one.role: one.report for one in view.facts}
        assert reports["prefill"] is not None
        assert reports["decode"] is not None
        assert compute_session_value([reports["decode"]]) > compute_session_value([reports["prefill"]])
        assert view.named
        assert view.refused == []


async def test_with_another_token_they_refuse(pair: dict[str, SimulatedEngine]) -> None:
    async with polling(pair, ResolvedFabric(type="TCP"), token="a-token-of-somebody-else") as view:
        await view.until(lambda: view.refused != [])
        await view.until(lambda: {one.fault for one in view.facts} == {"refused"})
        assert all(one.report is None for one in view.facts)


async def test_another_fabric_than_the_engines_use_is_told(pair: dict[str, SimulatedEngine]) -> None:
    async with polling(pair, ResolvedFabric(type="EFA")) as view:
        await view.all_told()
        assert (view.transport.status, view.transport.reason) == ("False", "WrongBackend")


async def test_tcp_in_the_place_of_efa_is_told(tmp_path: Path, token_file: Path) -> None:
    engine = make_engine("d", tmp_path, token_file, simulation={"backend": "LIBFABRIC", "provider": "tcp"})
    with running(engine):
        async with polling({"d": engine}, ResolvedFabric(type="EFA")) as view:
            await view.all_told()
            assert (view.transport.status, view.transport.reason) == ("False", "FellBackToTCP")


async def test_an_engine_that_no_peer_reaches_is_found_and_found_well_again(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bidikv_operator.engines.facts.REACH_SECONDS", 1.0)  # there was no earlier process
    settings = {"bidikv_silent_period_seconds": 0.5, "bidikv_silent_period_maximum_seconds": 2}
    engines = {name: make_engine(name, tmp_path, token_file, settings=settings) for name in ("p", "d1", "d2")}
    with running(*engines.values()):
        async with polling(engines, ResolvedFabric(type="TCP")) as view:
            await view.all_told()

            async def turns_until(condition: Callable[[], bool]) -> None:
                async with asyncio.timeout(2 * WAIT_SECONDS):
                    while not condition():
                        await ask(
                            engines["p"], **{contract.SOURCES_PARAM: [source(engines["d1"]), source(engines["d2"])]}
                        )
                        engines["p"].reset_prefix_cache()
                        await asyncio.sleep(0.5)

            def unreachable() -> set[str]:
                return {one.pod for one in view.facts if one.unreachable_seconds > 0}

            for name in ("d1", "d2"):
                await ask(engines[name])
            engines["d2"].set_faults(silent=True)
            await turns_until(lambda: unreachable() == {"d2"})
            assert all(one.fault is None for one in view.facts), "it answers all but its peers"
            engines["d2"].set_faults()
            await turns_until(lambda: not unreachable())
