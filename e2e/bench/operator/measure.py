"""The phases of one run: cold start, rest, single changes, restart; what happened is asked of the API server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bidikv_operator import names
from bidikv_operator.kinds import CHILD_KINDS, DEPLOYMENT, INFERENCE
from e2e.bench.operator.baseline import collect_writes, retarget, send_writes
from e2e.bench.operator.client import BenchError, Client, connect, do_all
from e2e.bench.operator.control_plane import ControlPlane
from e2e.bench.operator.observe import AuditLog, Call, Usage, observe_process
from e2e.bench.operator.plan import (
    RUNTIME_IMAGE,
    SAMPLES,
    Change,
    Plan,
    build_namespaces,
    build_resource,
    build_sample,
    get_number,
    plan_changes,
)
from e2e.install import ROOT
from e2e.kubectl import Kubectl
from e2e.operator_process import OperatorProcess

Object = dict[str, Any]

CRD: Final = ROOT / "crds" / f"{names.GROUP}_{names.PLURAL}.yaml"
SERVED_LIMIT_SECONDS: Final = 30.0
COLD_LIMIT_SECONDS: Final = 1800.0
CHANGE_LIMIT_SECONDS: Final = 30.0
IDLE_LIMIT_SECONDS: Final = 300.0
IDLE_POLL_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 2.0
"""The operator counts as idle when it reconciled nothing for so long."""
PAUSE_SECONDS: Final = 0.05
"""Between two changes."""


@dataclass(frozen=True)
class Phase:
    """A part of the run: how long it took, what the operator used in it and asked for."""

    seconds: float
    operator_cpu_seconds: float
    api_server_cpu_seconds: float
    calls: Sequence[Call]

    @property
    def writes(self) -> int:
        return sum(call.is_write for call in self.calls)


@dataclass(frozen=True)
class Run:
    cold: Phase
    children: dict[str, int]
    """By kind, after the cold start."""
    rest: Phase
    changes: Phase
    change_seconds: Sequence[float]
    restart: Phase
    cold_usage: Usage
    """Of the operator when the cold start was over."""
    usage: Usage
    """At the end of the phase of rest."""
    changed_usage: Usage
    """After the changes: what the first process ended with."""
    restart_usage: Usage


class Stopwatch:
    """Cuts a run into phases."""

    def __init__(self, control_plane: ControlPlane, find_operator: Callable[[], int | None]) -> None:
        self._server = control_plane.api_server
        self._find_operator = find_operator
        self._audit = AuditLog(control_plane.audit_log)
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()
        self._operator_began, self._server_began = self._observe()
        self._audit.take()

    def stop(self, ended: float | None = None) -> Phase:
        """The phase from the last ``restart``; ``ended`` is a moment that was over before now."""
        seconds = (ended or time.monotonic()) - self._began
        operator, server = self._observe()
        return Phase(seconds, operator - self._operator_began, server - self._server_began, self._audit.take())

    def _observe(self) -> tuple[float, float]:
        operator = self._find_operator()
        return (
            observe_process(operator).cpu_seconds if operator is not None else 0.0,
            observe_process(self._server).cpu_seconds,
        )


async def measure_operator(control_plane: ControlPlane, plan: Plan, folder: Path, kubectl: str) -> Run:
    """All phases on a fresh control plane."""
    operator = _build_operator(control_plane, folder, kubectl, "bench")
    async with connect(control_plane) as client:
        await prepare(client, [build_resource(number) for number in range(plan.resources)])
        watch = Stopwatch(control_plane, lambda: operator.pid)
        try:
            ended = await _start_cold(client, operator, plan, watch)
            cold, cold_usage = watch.stop(ended), _observe(operator)
            children = await _count_children(client)
            await _wait_until_idle(operator)
            watch.restart()
            await asyncio.sleep(plan.rest_seconds)
            rest, usage = watch.stop(), _observe(operator)
            watch.restart()
            change_seconds = [seconds async for seconds in _change(client, plan)]
            changes, changed_usage = watch.stop(), _observe(operator)
            await _wait_until_idle(operator)
            await asyncio.to_thread(operator.terminate)
            watch.restart()
            await asyncio.to_thread(operator.start)
            ended = await _wait_until_idle(operator, least_runs=plan.resources)
            restart, restart_usage = watch.stop(ended), _observe(operator)
            await asyncio.to_thread(operator.terminate)
        finally:
            operator.kill()
    return Run(
        cold=cold,
        children=children,
        rest=rest,
        changes=changes,
        change_seconds=change_seconds,
        restart=restart,
        cold_usage=cold_usage,
        usage=usage,
        changed_usage=changed_usage,
        restart_usage=restart_usage,
    )


@dataclass(frozen=True)
class Baseline:
    seconds: float
    writes: int
    api_server_cpu_seconds: float


async def measure_baseline(control_plane: ControlPlane, plan: Plan, folder: Path, kubectl: str) -> Baseline:
    """The same writes by a bare client, on a fresh control plane whose audit log holds bodies."""
    operator = _build_operator(control_plane, folder, kubectl, "recorded")
    async with connect(control_plane) as client:
        samples = [build_sample(number) for number in range(SAMPLES)]
        stored_samples = sorted(await prepare(client, samples), key=lambda sample: str(sample["metadata"]["name"]))
        try:
            await asyncio.to_thread(operator.start)
            await _wait_until_idle(operator, least_runs=SAMPLES)
            await asyncio.to_thread(operator.terminate)
        finally:
            operator.kill()
        with control_plane.audit_log.open("rb") as lines:
            recorded = collect_writes(lines)
        resources = await _create(client, [build_resource(number) for number in range(plan.resources)])
        writes = []
        for resource in resources:
            sample = stored_samples[get_number(resource) % SAMPLES]["metadata"]
            writes.append(retarget(recorded[sample["namespace"]], sample, resource["metadata"]))
        before = observe_process(control_plane.api_server).cpu_seconds
        seconds = await send_writes(client, writes)
        used = observe_process(control_plane.api_server).cpu_seconds - before
        return Baseline(seconds, sum(map(len, writes)), used)


def _build_operator(control_plane: ControlPlane, folder: Path, kubectl: str, identity: str) -> OperatorProcess:
    return OperatorProcess(
        Kubectl(kubectl, str(control_plane.kubeconfig), "default"),
        identity=identity,
        runtime_image=RUNTIME_IMAGE,
        folder=folder,
        settings={"BIDIKV_NAMESPACES": ""},
    )


async def prepare(client: Client, resources: Sequence[Object]) -> list[Object]:
    """Install the CRD and create namespaces and resources. Returns the resources as stored."""
    definition = yaml.safe_load(CRD.read_text())
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}"
    await client.apply(path, json.dumps(definition).encode())
    await _wait_until_served(client)
    for name in sorted({*build_namespaces(), *(resource["metadata"]["namespace"] for resource in resources)}):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await client.apply(f"/api/v1/namespaces/{name}", json.dumps(body).encode())
    return await _create(client, resources)


async def _create(client: Client, resources: Sequence[Object]) -> list[Object]:
    stored: list[Object] = []

    async def create(resource: Object) -> None:
        path = INFERENCE.path(resource["metadata"]["namespace"])
        stored.append(json.loads(await client.call("POST", path, json.dumps(resource).encode(), "application/json")))

    await do_all(create, resources)
    return stored


async def _wait_until_served(client: Client) -> None:
    deadline = time.monotonic() + SERVED_LIMIT_SECONDS
    while True:
        try:
            await client.list(INFERENCE)
            return
        except BenchError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(IDLE_POLL_SECONDS)


async def _start_cold(client: Client, operator: OperatorProcess, plan: Plan, watch: Stopwatch) -> float:
    """Start the operator; the moment when the last resource got its status, which is written after its children."""
    listed = await client.list(INFERENCE)
    waiting = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in listed["items"]}
    async with client.watch(INFERENCE, listed["metadata"]["resourceVersion"]) as events:
        watch.restart()
        start = asyncio.create_task(asyncio.to_thread(operator.start))
        async with asyncio.timeout(COLD_LIMIT_SECONDS):
            async for event in events:
                metadata = event["object"]["metadata"]
                seen = event["object"].get("status", {}).get("observedGeneration", 0)
                if seen >= metadata["generation"]:
                    waiting.discard((metadata["namespace"], metadata["name"]))
                if not waiting:
                    break
        ended = time.monotonic()
        await start
    return ended


async def _count_children(client: Client) -> dict[str, int]:
    return {
        kind.plural: len((await client.list(kind, label_selector=names.LABEL_OWNER))["items"]) for kind in CHILD_KINDS
    }


async def _change(client: Client, plan: Plan) -> AsyncIterator[float]:
    """Ask for the changes one by one; seconds from before the request until the child was seen to be changed."""
    listed = await client.list(DEPLOYMENT, label_selector=names.LABEL_OWNER)
    version = listed["metadata"]["resourceVersion"]
    async with client.watch(DEPLOYMENT, version, label_selector=names.LABEL_OWNER) as events:
        for change in plan_changes(plan):
            path = INFERENCE.path(change.namespace, change.name)
            began = time.monotonic()
            async with asyncio.timeout(CHANGE_LIMIT_SECONDS):
                await client.call("PATCH", path, json.dumps(change.patch).encode(), "application/merge-patch+json")
                async for event in events:
                    if _follows(event["object"], change):
                        break
            yield time.monotonic() - began
            await asyncio.sleep(PAUSE_SECONDS)


def _follows(deployment: Object, change: Change) -> bool:
    metadata = deployment["metadata"]
    return bool(
        metadata["namespace"] == change.namespace
        and metadata["labels"][names.LABEL_OWNER] == change.name
        and metadata["labels"][names.LABEL_ROLE] == names.ROUTER
        and deployment["spec"]["replicas"] == change.replicas
    )


async def _wait_until_idle(operator: OperatorProcess, *, least_runs: int = 0) -> float:
    """The moment after which the operator reconciled nothing more; ``least_runs`` must have been before."""
    deadline = time.monotonic() + IDLE_LIMIT_SECONDS
    last, since = -1.0, time.monotonic()
    while True:
        runs = await asyncio.to_thread(operator.metric, "bidikv_operator_reconciles_total")
        now = time.monotonic()
        if runs != last:
            last, since = runs, now
        elif now - since >= IDLE_SECONDS and runs >= least_runs:
            return since
        if now > deadline:
            raise BenchError(f"the operator was not idle within {IDLE_LIMIT_SECONDS:.0f} s ({runs:.0f} reconciles)")
        await asyncio.sleep(IDLE_POLL_SECONDS)


def _observe(operator: OperatorProcess) -> Usage:
    assert operator.pid is not None
    return observe_process(operator.pid)
