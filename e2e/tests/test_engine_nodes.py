"""A replica that spans nodes, as the operator starts it: N is one engine of tensor parallel size 2 in two "pods", the
second of which serves nothing. It exchanges KV with S, an engine in one pod, in both directions.

The pods are groups of processes on loopback; what LeaderWorkerSet would write into their environment is filled in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from bidikv_operator.build.engine import HEADLESS_SERVER, MASTER_PORT, SERVER, build_engine_args
from bidikv_operator.tests.samples import make_resource, resolve
from bidikv_runtime import contract
from e2e.engine.client import EngineClient, Message
from e2e.engine.fixtures import OUTPUT_TOKENS, assert_same, assistant, eventually, user, whole_blocks
from e2e.engine.local import HOST, LocalEngine, free_port, running
from e2e.engine.provision import TINY_LINK

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]
ROOM = ("--num-gpu-blocks-override", "160", "--max-model-len", "4096")
SETTINGS = {"bidikv_cost_model": "AlwaysPull"}
PRETEND_VLLM = (
    "import importlib.metadata as m, runpy, sys; known = m.version; "
    "m.version = lambda name: '0+cpu' if name == 'vllm' else known(name); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""vLLM's command line asks for the version of the distribution ``vllm``, whose name on CPUs is another."""


def list_parallel_args(port: int, *, is_worker: bool) -> list[str]:
    """The operator's arguments about parallelism, as a kubelet expands them."""
    resolved = resolve(make_resource(decode={"tensorParallelSize": 2, "nodesPerReplica": 2, "gpusPerPod": 0}))
    args = build_engine_args(resolved, resolved.decode, is_worker=is_worker)
    args = args[args.index("--tensor-parallel-size") : args.index("--shutdown-timeout")]
    environment = {"$(LWS_LEADER_ADDRESS)": HOST, "$(LWS_WORKER_INDEX)": "1", str(MASTER_PORT): str(port)}
    # vLLM chooses processes by itself for several nodes with GPUs, not for CPUs.
    return [*(environment.get(arg, arg) for arg in args), "--distributed-executor-backend", "mp"]


@dataclass
class Worker(LocalEngine):
    """The second pod: ready is what the first one is."""

    is_ready_with: LocalEngine = field(kw_only=True)

    def command(self) -> list[str]:
        command = super().command()
        module = command.index(SERVER[-1])
        flag, name, *rest = HEADLESS_SERVER[1:]
        assert flag == command[module - 1] == "-m"
        return [command[0], "-c", PRETEND_VLLM, name, *rest, *command[module + 1 :]]

    def _is_healthy(self) -> bool:
        return self.is_ready_with._is_healthy()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalEngine]]:
    logs, port = tmp_path_factory.mktemp("nodes"), free_port()
    first = LocalEngine(
        "N",
        logs / "N.log",
        arguments=(*ROOM, *list_parallel_args(port, is_worker=False)),
        model=TINY_LINK,
        settings=SETTINGS,
    )
    worker = Worker(
        "N-1",
        logs / "N-1.log",
        arguments=(*ROOM, *list_parallel_args(port, is_worker=True)),
        model=TINY_LINK,
        settings=SETTINGS,
        port=first.port,
        is_ready_with=first,
    )
    single = LocalEngine("S", logs / "S.log", arguments=ROOM, model=TINY_LINK, settings=SETTINGS)
    with running({"N": first, "N-1": worker, "S": single}) as started:
        yield dict(started)


@pytest_asyncio.fixture
async def clients(engines: dict[str, LocalEngine]) -> AsyncIterator[dict[str, EngineClient]]:
    async with AsyncExitStack() as stack:
        opened = {name: await stack.enter_async_context(EngineClient(engines[name])) for name in ("N", "S")}
        for client in opened.values():
            await eventually(client.reset_prefix_cache, f"{client.engine.name} to reset its prefix cache")
        yield opened


async def count_reused(client: EngineClient) -> int:
    try:
        return int((await client.metrics()).value(contract.METRIC_REUSED_TOKENS))
    except KeyError:
        return 0


@pytest.mark.parametrize(("prefill", "decode"), [("S", "N"), ("N", "S")])
async def test_conversation_over_nodes_equals_the_reference(
    clients: dict[str, EngineClient], prefill: str, decode: str
) -> None:
    p, d = clients[prefill], clients[decode]
    messages: list[Message] = []
    previous = 0
    for number in range(2):
        messages.append(user(f"{prefill} {decode} {number}"))
        before = await count_reused(p), await count_reused(d)
        await p.chat(messages, max_tokens=1, sources=[d.engine.source], stream=False)
        [answer] = await d.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[p.engine.source])
        after = await count_reused(p), await count_reused(d)
        [expected] = await clients["S"].chat(messages, max_tokens=OUTPUT_TOKENS, cache_salt=f"{prefill} {number}")
        assert_same(answer, expected)
        prompt = len(await p.tokenize(messages))
        held_by_d = whole_blocks(previous + OUTPUT_TOKENS - 1) if number else 0
        assert after[0] - before[0] == held_by_d
        assert after[1] - before[1] == whole_blocks(prompt - 1) - held_by_d
        previous = prompt
        messages.append(assistant(answer))
        await eventually(p.reset_prefix_cache, f"{prefill} to reset its prefix cache")
