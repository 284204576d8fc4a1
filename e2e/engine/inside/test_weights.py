"""The connector hears of every change of weights, and of memory, that vLLM's engine core is asked for."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

from bidikv_runtime.connector.weights import watch_weights
from e2e.engine.shadow import Prompt, ShadowEngine, Weights


def build_core(result: Any = None) -> Any:
    """As much of an engine core as the calls need, its workers included."""

    def work(*arguments: Any) -> list[Any]:
        if isinstance(result, Exception):
            raise result
        return [result]

    core = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=work)
    core._weight_version = "default"
    return core


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("update_weights", 1),
        ("start_weight_update", 1),
        ("finish_weight_update", 1),
        ("reload_weights", 1),
        (lambda worker: None, 1),
        ("compute_weight_checksums", 0),
    ],
)
def test_calls_to_the_workers(method: Any, changes: int) -> None:
    seen: list[str] = []
    end = watch_weights(EngineCore, lambda: seen.append("change"), seen.append)
    try:
        assert build_core("done").collective_rpc(method, args=(1,)) == ["done"]
        assert seen == ["change"] * changes
    finally:
        end()


def test_a_call_that_fails_may_have_changed_weights() -> None:
    seen: list[str] = []
    end = watch_weights(EngineCore, lambda: seen.append("change"), seen.append)
    try:
        with pytest.raises(RuntimeError, match="half of it"):
            build_core(RuntimeError("half of it")).collective_rpc("update_weights")
        assert seen == ["change"]
    finally:
        end()


def test_every_kind_of_engine_core_is_watched_and_keeps_its_signatures() -> None:
    end = watch_weights(EngineCore, lambda: None, lambda name: None)
    end()
    for name in ("collective_rpc", "set_weight_version", "sleep"):
        for kind in (EngineCoreProc, DPEngineCoreProc):
            assert getattr(kind, name) is getattr(EngineCore, name)
    # vLLM converts the arguments of such calls by these.
    assert list(inspect.signature(EngineCore.collective_rpc).parameters) == [
        "self",
        "method",
        "timeout",
        "args",
        "kwargs",
    ]
    assert list(inspect.signature(EngineCore.set_weight_version).parameters) == ["self", "weight_version"]


def test_publications_end_with_the_weights() -> None:
    engine = ShadowEngine("only", {}, Weights())
    try:
        engine.send(Prompt(tuple(range(9))), 1)
        work(engine)
        assert len(engine.index) == 2
        served = engine.connector.connector_scheduler.describe()["compatibility"]["weights"]
        core = build_core()
        core.collective_rpc("finish_weight_update")
        assert len(engine.index) == 0
        unnamed = engine.connector.connector_scheduler.describe()["compatibility"]["weights"]
        assert unnamed.startswith("unnamed-")
        core.set_weight_version("step 7")
        assert core.get_weight_version() == "step 7"
        assert served != engine.connector.connector_scheduler.describe()["compatibility"]["weights"] == "step 7"
    finally:
        engine.stop()


def test_readers_hear_that_memory_was_registered_anew() -> None:
    """As after a sleep in vLLM 0.33, whose scheduler side counts registrations; 0.32 has no such count."""
    engines: dict[str, ShadowEngine] = {}
    source, reader = (ShadowEngine(name, engines, Weights()) for name in ("source", "reader"))
    try:
        prompt = Prompt(tuple(range(18)))
        source.send(prompt, 1)
        work(source)
        side = source.connector.connector_scheduler
        side._registration_generation = 3
        side.set_xfer_handshake_metadata({})
        reader.send(prompt, 1, [source.source])
        reader.schedule()
        [read] = next(iter(reader.connector.connector_scheduler._readers.values())).reuse.read.parts
        assert read.peer.registration == 3
    finally:
        source.stop()
        reader.stop()


def work(engine: ShadowEngine) -> None:
    while not engine.idle:
        engine.schedule()
        engine.execute()
        engine.process()
