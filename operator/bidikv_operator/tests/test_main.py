"""Start-up: what stops it, with which words, and that a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from bidikv_operator import __main__ as module
from bidikv_operator.kinds import INFERENCE, LEADER_WORKER_SET, OPTIONAL_KINDS, POD, POD_MONITOR, WATCHED_KINDS, Kind
from bidikv_operator.kube import ForbiddenError, NotFoundError, TransientError
from bidikv_operator.settings import Settings

SETTINGS = Settings(runtime_image="i:1", http_host="127.0.0.1", http_port=0)
DEADLINE = 20.0


class StartingKube:
    """Answers discovery and the Lease; everything else would be a mistake at this stage."""

    def __init__(self) -> None:
        self.missing: tuple[Kind, ...] = ()
        self.errors: list[Exception] = []
        self.forbidden: Kind | None = None
        self.lease: dict[str, Any] | None = None

    async def discover(self, kind: Kind) -> bool:
        if self.errors:
            raise self.errors.pop(0)
        return kind not in self.missing

    async def try_list(self, kind: Kind, namespace: str | None) -> None:
        if kind == self.forbidden:
            raise ForbiddenError(f"{kind.plural} is forbidden")

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        if self.lease is None:
            raise NotFoundError("no lease")
        return self.lease

    async def create_lease(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.lease = manifest
        return manifest

    async def replace_lease(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.lease = manifest
        return manifest


def make_operator(kube: StartingKube) -> module.Operator:
    return module.Operator(SETTINGS, kube)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (INFERENCE, r"bidikvinferences\.serving\.bidikv\.io v1alpha1; install the CRD"),
        (POD, "does not serve pods v1; use a newer Kubernetes"),
    ],
)
async def test_a_kind_that_is_not_served(missing: Kind, words: str) -> None:
    kube = StartingKube()
    kube.missing = (missing,)
    with pytest.raises(module.StartError, match=words):
        await make_operator(kube).run()


async def test_an_api_server_that_refuses() -> None:
    kube = StartingKube()
    kube.errors = [ForbiddenError("no discovery for you")]
    with pytest.raises(module.StartError, match="refuses discovery: no discovery for you"):
        await make_operator(kube).run()


async def test_missing_rights_end_the_start() -> None:
    kube = StartingKube()
    kube.forbidden = POD
    with pytest.raises(module.StartError, match="pods is forbidden; grant get, list and watch"):
        await make_operator(kube).run()


async def test_an_api_server_that_is_away_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISCOVERY_LIMIT_SECONDS", -1.0)
    kube = StartingKube()
    kube.errors = [TransientError("away")]
    with pytest.raises(module.StartError, match="does not answer: away"):
        await make_operator(kube).run()


async def test_a_candidate_that_waits_ends_cleanly_at_a_signal() -> None:
    kube = StartingKube()
    spec = {"holderIdentity": "another", "leaseDurationSeconds": 3600, "renewTime": "x"}
    kube.lease = {"metadata": {"resourceVersion": "1"}, "spec": spec}
    running = asyncio.create_task(make_operator(kube).run())
    asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE):
        assert await running == 0


async def test_a_kind_that_goes_while_the_lease_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    class Later(StartingKube):
        async def create_lease(self, manifest: dict[str, Any]) -> dict[str, Any]:
            self.missing = (INFERENCE,)
            return await super().create_lease(manifest)

    kube = Later()
    async with asyncio.timeout(DEADLINE):
        assert await make_operator(kube).run() == 1
    assert "install the CRD" in caplog.text
    assert kube.lease is not None
    assert kube.lease["spec"]["holderIdentity"] == "", "another candidate may lead at once"


async def test_kopf_is_told_who_it_is_and_where_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself it asks for the user's name, and ends where the uid has none."""
    told: dict[str, Any] = {}

    async def spawn_tasks(**arguments: Any) -> list[asyncio.Task[None]]:
        told.update(arguments)
        return []

    async def run_tasks(tasks: object, *, ignored: object) -> None:
        return None

    monkeypatch.setattr("kopf.spawn_tasks", spawn_tasks)
    monkeypatch.setattr("kopf.run_tasks", run_tasks)
    await make_operator(StartingKube())._watch(asyncio.Event())
    assert told["identity"] == SETTINGS.identity
    assert (told["standalone"], told["clusterwide"], told["namespaces"]) == (True, True, ())


async def test_optional_kinds_that_are_not_there_are_not_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kube = StartingKube()
    kube.missing, kube.forbidden = (LEADER_WORKER_SET,), POD_MONITOR
    operator, told = make_operator(kube), dict[str, Any]()

    async def spawn_tasks(**arguments: Any) -> list[asyncio.Task[None]]:
        told.update(arguments)
        return []

    async def run_tasks(tasks: object, *, ignored: object) -> None:
        return None

    monkeypatch.setattr("kopf.spawn_tasks", spawn_tasks)
    monkeypatch.setattr("kopf.run_tasks", run_tasks)
    await operator._watch(asyncio.Event())
    watched = {handler.selector.plural for handler in told["registry"]._watching.get_all_handlers()}
    assert watched == {kind.plural for kind in (*WATCHED_KINDS, *OPTIONAL_KINDS)} - {"leaderworkersets", "podmonitors"}
    assert operator._reconciler.missing_kinds == {LEADER_WORKER_SET, POD_MONITOR}
    await operator._compare_kinds()
    assert not operator._stop.is_set()
    assert caplog.text.count("PodMonitor is left alone as if it were not served: podmonitors is forbidden") == 1
    kube.missing = ()
    await operator._compare_kinds()
    assert operator._stop.is_set(), "the next start watches it"


async def test_a_failed_watch_is_named_and_not_the_workers_that_kopf_cancels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise RuntimeError("404 page not found")

    async def spawn_tasks(**_: Any) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(fail())]

    async def run_tasks(tasks: list[asyncio.Task[None]], *, ignored: set[asyncio.Task[Any]]) -> None:
        await asyncio.wait(tasks)
        for task in asyncio.all_tasks():
            if task.get_name() == "work":
                task.cancel()
        await asyncio.sleep(DEADLINE)

    monkeypatch.setattr("kopf.spawn_tasks", spawn_tasks)
    monkeypatch.setattr("kopf.run_tasks", run_tasks)
    monkeypatch.setattr(module, "STOP_LIMIT_SECONDS", 0.1)
    async with asyncio.timeout(DEADLINE):
        assert await make_operator(StartingKube()).run() == 1
    assert "Stopping: a watch failed: 404 page not found" in caplog.text


def test_missing_settings_end_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("BIDIKV_RUNTIME_IMAGE", raising=False)
    assert module.main() == 1
    assert capsys.readouterr().err.startswith("bidikv-operator: BIDIKV_RUNTIME_IMAGE is not set")
