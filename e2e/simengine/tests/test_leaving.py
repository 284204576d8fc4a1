"""Simulated engines that leave, and engines of two releases, behind the real router: nothing fails, and what could be
used again is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from bidikv_runtime import contract
from bidikv_runtime.connector.report import READERS_SECONDS
from bidikv_runtime.contract import EngineReport, RouterConfig
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.control.token_file import TokenFile
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.wiring import Router
from e2e.engine.fixtures import eventually
from e2e.simengine.local import HOST, SERVED_MODEL, SimulatedEngine, running
from e2e.simengine.tests.test_paths import HISTORY, QUESTION, WAIT_SECONDS, answered, ask, reused, say, scrape

DRAIN_SECONDS = 50
"""Far more than a drain takes that has nothing to wait for."""
GROUPS = {"p1": "a", "p2": "a", "d1": "a", "d2": "a", "pb": "b", "db": "b"}
"""Engines by the group that may share KV."""
VERSIONS = {"a": "0.32.0", "b": "0.33.0"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SimulatedEngine]]:
    folder = tmp_path_factory.mktemp("leaving")
    tokens = folder / "tokens"
    tokens.write_text("token-of-all-engines\n")
    found = {
        name: SimulatedEngine(
            name,
            folder / f"{name}.log",
            settings={"bidikv_cost_model": "AlwaysPull"},
            simulation={"vllm_version": VERSIONS[group]},
            environment={contract.ENV_TOKEN_FILE: str(tokens)},
        )
        for name, group in GROUPS.items()
    }
    with pytest.MonkeyPatch.context() as patch, running(*found.values()):
        patch.setenv(contract.ENV_TOKEN_FILE, str(tokens))
        yield found


@dataclass
class Service:
    """A router, and which engines its discovery lists; a terminating one answers until it is removed."""

    engines: dict[str, SimulatedEngine]
    router: Router
    url: str = ""
    listed: dict[str, bool] = field(default_factory=dict)
    """By name: whether it terminates."""
    hooks: list[asyncio.subprocess.Process] = field(default_factory=list)

    def show(self, **terminating: bool | None) -> None:
        """Change the list; None removes an engine."""
        for name, leaves in terminating.items():
            if leaves is None:
                del self.listed[name]
            else:
                self.listed[name] = leaves
        self.router.take_pools(Pools(self._endpoints("p"), self._endpoints("d")))

    def _endpoints(self, role: str) -> tuple[Endpoint, ...]:
        return tuple(
            replace(self.engines[name].endpoint, ready=not leaves, terminating=leaves)
            for name, leaves in sorted(self.listed.items())
            if name.startswith(role)
        )

    async def wait_for_reports(self) -> None:
        """Until every listed engine has been asked since now."""
        engines = self.router.fleet.list_reporting()
        assert len(engines) == len(self.listed)
        began = {engine.address: self.ages()[engine.address] for engine in engines}
        await asyncio.sleep(0.1)

        async def all_told() -> bool:
            return all(age < began[address] or age < 0.1 for address, age in self.ages().items())

        await eventually(all_told, "reports of all engines")

    def ages(self) -> dict[str, float]:
        return {view.address: view.report_age for view in self.router.fleet.describe()}

    async def drain(self, name: str, *flags: str) -> asyncio.subprocess.Process:
        """The preStop hook of an engine; it ends with the test at the latest."""
        self.hooks.append(await start_drain(self.engines[name], *flags))
        return self.hooks[-1]

    async def start_sessions(self, count: int) -> list[list[dict[str, str]]]:
        """Conversations after their first turn, each long enough that its KV is worth being read."""
        conversations = [[say(f"Conversation {os.urandom(8).hex()}. {HISTORY}")] for _ in range(count)]
        for messages in conversations:
            await self.go_on(messages)
        return conversations

    async def start_sessions_at(self, name: str, count: int) -> list[list[dict[str, str]]]:
        """Conversations as above, and more of them until one is at this decode engine: where they go is a draw."""
        served = await count_served(self.engines[name])
        conversations = await self.start_sessions(count)
        while await count_served(self.engines[name]) == served:
            conversations += await self.start_sessions(1)
        return conversations

    async def go_on(self, messages: list[dict[str, str]]) -> None:
        """One more turn."""
        answer, _ = await ask(self.url, messages)
        messages += [answered(answer), say(QUESTION * 12)]


@pytest_asyncio.fixture
async def service(engines: dict[str, SimulatedEngine]) -> AsyncIterator[Service]:
    for engine in engines.values():
        assert engine.reset_prefix_cache()
    config = RouterConfig(namespace="", prefill_service="", decode_service="", served_model_name=SERVED_MODEL)
    limits = replace(Limits(), report_seconds=0.05, report_idle_seconds=0.05, warm_seconds=0)
    router = Router(config, limits, TokenFile.from_environment(os.environ))
    service = Service(engines, router)
    router.start_control()
    try:
        service.url = f"http://{HOST}:{await router.server.listen(HOST, 0)}"
        yield service
    finally:
        for hook in service.hooks:
            if hook.returncode is None:
                hook.kill()
            await hook.communicate()
        await router.close()


async def read_report(engine: SimulatedEngine) -> EngineReport:
    headers = {"Authorization": "Bearer token-of-all-engines"}
    url = f"http://{HOST}:{engine.state_port}{contract.REPORT_PATH}?sessions=0"
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        return msgspec.json.decode(await response.read(), type=EngineReport)


async def start_drain(engine: SimulatedEngine, *flags: str) -> asyncio.subprocess.Process:
    """The engine's preStop hook, as a pod runs it."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", contract.DRAIN_MODULE, "--leave-seconds", "0.2", "--seconds", str(DRAIN_SECONDS)),
        *("--state-port", str(engine.state_port), *flags),
        env=os.environ | {contract.ENV_LOOKUP_HOST: HOST},
        stdout=asyncio.subprocess.PIPE,
    )


async def finish(drain: asyncio.subprocess.Process) -> str:
    """What the hook has to say; it ends before its time is over, or the test fails."""
    output, _ = await asyncio.wait_for(drain.communicate(), WAIT_SECONDS)
    assert drain.returncode == 0
    return output.decode()


async def count_served(engine: SimulatedEngine) -> float:
    return (await scrape(engine)).value("vllm:request_success_total")


async def count_cached(engine: SimulatedEngine) -> float:
    return (await scrape(engine)).value("vllm:prefix_cache_hits_total")


async def test_sessions_of_a_decode_engine_that_leaves_are_read_and_go_on_elsewhere(service: Service) -> None:
    engines = service.engines
    service.show(p1=False, d1=False, d2=False)
    conversations = await service.start_sessions_at("d1", 8)
    unread = {name: (await read_report(engines[name])).unread_sessions for name in ("d1", "d2")}
    assert sum(unread.values()) == len(conversations)
    assert unread["d1"] > 0
    service.show(d1=True)
    drain = await service.drain("d1")
    await service.wait_for_reports()  # those that leave are asked, too
    served, read = await count_served(engines["d1"]), await reused(engines["p1"])
    assert engines["p1"].reset_prefix_cache()  # what prefill knows by itself proves nothing
    await asyncio.sleep(2.5)
    assert drain.returncode is None, "its sessions have not been read"
    for messages in conversations:
        await service.go_on(messages)
    assert await count_served(engines["d1"]) == served, "no turn goes to an engine that leaves"
    assert await reused(engines["p1"]) - read > unread["d1"] * 600, "its KV was used all the same"
    assert (await read_report(engines["d1"])).unread_sessions == 0
    assert "nothing is left" in await finish(drain)
    service.show(d1=None)
    prefills, cached = await count_served(engines["p1"]), await count_cached(engines["d2"])
    for messages in conversations:
        await service.go_on(messages)
    assert await count_served(engines["p1"]) == prefills
    assert await count_cached(engines["d2"]) - cached > len(conversations) * 800, "the sessions live on where they went"


async def test_streams_of_an_engine_that_leaves_end_undisturbed(service: Service) -> None:
    engines = service.engines
    service.show(p1=False, d1=False)
    messages = [say(f"A stream. {HISTORY}")]
    expected, _ = await ask(engines["d2"].url, messages, max_tokens=120)
    engines["d1"].set_faults(slow=20)
    stream = asyncio.create_task(ask(service.url, messages, max_tokens=120, stream=True))

    async def runs() -> bool:
        return bool((await scrape(engines["d1"])).value("vllm:num_requests_running"))

    await eventually(runs, "decode to stream")
    service.show(d1=True, d2=False)
    drain = await service.drain("d1")
    await asyncio.sleep(2.5)
    assert drain.returncode is None, "a request runs"
    engines["d1"].set_faults()
    assert (await stream)[0] == expected
    await service.go_on([*messages, answered(expected), say(QUESTION * 12)])
    assert "nothing is left" in await finish(drain)


async def test_sessions_that_no_router_has_read_are_not_waited_for(service: Service) -> None:
    """Where nothing flows back, and when the routers are gone: the whole service is deleted."""
    engines = service.engines
    service.show(p1=False, d1=False)
    await service.start_sessions(1)
    await service.wait_for_reports()
    assert (await read_report(engines["d1"])).unread_sessions == 1
    await service.router.close()

    async def nobody_reads() -> bool:
        return (await read_report(engines["d1"])).unread_sessions == 0

    await eventually(nobody_reads, "the engine to see that no router asks any more", READERS_SECONDS + WAIT_SECONDS)
    assert "nothing is left" in await finish(await service.drain("d1"))


async def test_a_prefill_engine_that_leaves_gets_no_prompt_and_its_results_are_read(service: Service) -> None:
    engines = service.engines
    service.show(p1=False, d1=False)
    engines["p1"].set_faults(slow=50)
    first = asyncio.create_task(service.start_sessions(1))

    async def computes() -> bool:
        return (await read_report(engines["p1"])).requests == 1

    await eventually(computes, "prefill to compute")
    service.show(p1=True, p2=False)
    drain = await service.drain("p1")
    served, read = await count_served(engines["p1"]), await reused(engines["d1"])
    engines["p1"].set_faults()
    await first
    assert await reused(engines["d1"]) - read > 600
    await service.start_sessions(4)
    assert await count_served(engines["p1"]) == served + 1
    assert "nothing is left" in await finish(drain)
    report = await read_report(engines["p1"])
    assert (report.requests, report.unread_handovers, report.unread_sessions) == (0, 0, 0)


async def test_the_last_engines_serve_on_while_they_leave(service: Service) -> None:
    service.show(p1=True, d1=True)
    conversations = await service.start_sessions(2)
    await service.go_on(conversations[0])
    assert service.router.fleet.explain_unready() is None
    service.show(p2=False, d2=False)
    await service.wait_for_reports()
    served = await count_served(service.engines["d1"]), await count_served(service.engines["p1"])
    for messages in conversations:
        await service.go_on(messages)
    assert served == (await count_served(service.engines["d1"]), await count_served(service.engines["p1"]))


async def test_sessions_move_to_a_new_release_when_both_of_its_roles_are_ready(service: Service) -> None:
    engines = service.engines
    service.show(p1=False, d1=False)
    conversations = await service.start_sessions(2)
    service.show(db=False)
    await service.wait_for_reports()
    before = await count_served(engines["db"])
    conversations += await service.start_sessions(8)
    for messages in conversations:
        await service.go_on(messages)
    assert await count_served(engines["db"]) == before, "there is no prefill for it"
    service.show(pb=False)
    await service.wait_for_reports()
    conversations += await service.start_sessions_at("db", 8)
    assert await count_served(engines["db"]) > before
    assert await count_served(engines["pb"]) == await count_served(engines["db"]), "by its own prefill alone"
    service.show(d1=True, p1=True)
    before = await count_served(engines["d1"])
    for messages in conversations:
        await service.go_on(messages)
    assert await count_served(engines["d1"]) == before
    assert "nothing is left" in await finish(await service.drain("d1")), "nobody could read its sessions"
    service.show(d1=None, p1=None)
    cached = await count_cached(engines["db"])
    for messages in conversations:
        await service.go_on(messages)
    assert await count_cached(engines["db"]) - cached > len(conversations) * 800, "the sessions live on where they went"
    refused = (await scrape(engines["pb"])).value(contract.METRIC_LOOKUPS, result="refused")
    assert refused == 0, "no KV is offered across releases"


async def test_an_old_pair_that_leaves_serves_on_until_the_new_one_is_whole(service: Service) -> None:
    engines = service.engines
    service.show(p1=False, d1=False)
    [messages] = await service.start_sessions(1)
    service.show(p1=True, d1=True, pb=False)
    await service.wait_for_reports()
    before = await count_served(engines["d1"]), await count_served(engines["p1"])
    await service.go_on(messages)
    await service.start_sessions(1)
    assert before < (await count_served(engines["d1"]) - 1, await count_served(engines["p1"]))
    service.show(db=False)
    await service.wait_for_reports()
    served = await count_served(engines["db"])
    await service.go_on(messages)
    assert await count_served(engines["db"]) == served + 1


def test_a_hook_waits_for_no_engine_that_does_not_answer(tmp_path: Path) -> None:
    engine = SimulatedEngine("gone", tmp_path / "log")

    async def run() -> str:
        return await finish(await start_drain(engine))

    assert "does not answer" in asyncio.run(run())
