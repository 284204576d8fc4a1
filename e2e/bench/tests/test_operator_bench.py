"""The bench of the operator: what it plans, how it counts, and a small run on a real API server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.bench.operator.baseline import Write, collect_writes, retarget
from e2e.bench.operator.measure import Baseline, Phase, Run
from e2e.bench.operator.observe import AuditLog, Call, Usage, count_calls, parse_call, parse_status
from e2e.bench.operator.plan import SAMPLES, Plan, build_resource, build_sample, get_number, plan_changes
from e2e.bench.operator.report import build_result, build_table, compute_percentile, judge
from e2e.install import ROOT

RUN_LIMIT_SECONDS = 500


def audit(verb: str = "patch", resource: str = "services", **changes: Any) -> dict[str, Any]:
    return {
        "verb": verb,
        "userAgent": "bidikv-operator/one",
        "requestURI": "/api/v1/namespaces/samples-0/services/sample-0000?force=true",
        "objectRef": {"resource": resource, "namespace": "samples-0"},
        "requestObject": {"metadata": {"name": "sample-0000", "ownerReferences": [{"uid": "u-sample"}]}},
        "responseStatus": {"code": 201},
        **changes,
    }


def test_resources_differ_and_are_found_again() -> None:
    resources = [build_resource(number) for number in range(30)]
    assert len({(item["metadata"]["namespace"], item["metadata"]["name"]) for item in resources}) == 30
    assert [get_number(item) for item in resources] == list(range(30))
    assert {item["spec"]["fabric"]["type"] for item in resources} == {"TCP", "EFA"}
    for number in range(SAMPLES):
        assert build_sample(number)["spec"] == resources[number]["spec"] == resources[number + SAMPLES]["spec"]


def test_each_change_changes_something() -> None:
    replicas: dict[str, int] = {}
    changes = list(plan_changes(Plan(resources=3, changes=50, rest_seconds=0)))
    assert len(changes) == 50
    for change in changes:
        assert change.replicas != replicas.get(change.name, 2)
        replicas[change.name] = change.replicas


def test_memory_of_a_process() -> None:
    text = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\n"
    assert parse_status(text) == {"peak_bytes": 300 * 1024, "resident_bytes": 200 * 1024}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (audit(), Call("patch", "services", 201)),
        (audit(userAgent="bidikv-operator-watch", verb="watch"), Call("watch", "services", 201)),
        (
            audit(objectRef={"resource": "bidikvinferences", "subresource": "status"}),
            Call("patch", "bidikvinferences/status", 201),
        ),
        (audit(userAgent="bench"), None),
        (audit(objectRef=None), None),
    ],
)
def test_whose_call_it_was(event: dict[str, Any], expected: Call | None) -> None:
    assert parse_call(event) == expected


def test_what_counts_as_a_write() -> None:
    calls = [Call(verb, "services", 200) for verb in ("get", "list", "watch", "patch", "create", "delete")]
    calls.append(Call("update", "leases", 200))
    assert [call.verb for call in calls if call.is_write] == ["patch", "create", "delete"]
    assert count_calls([*calls, calls[3]])["patch"] == {"services": 2}


def test_an_audit_log_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    whole, half = json.dumps(audit()) + "\n", json.dumps(audit(verb="create"))
    path.write_text(whole + half)
    log = AuditLog(path)
    assert [call.verb for call in log.take()] == ["patch"]
    with path.open("a") as file:
        file.write("\n" + whole)
    assert [call.verb for call in log.take()] == ["create", "patch"]
    assert log.take() == []


def test_recorded_writes_are_sent_for_others() -> None:
    events = [audit(), audit(verb="get"), audit(responseStatus={"code": 409}), audit(userAgent="bench")]
    recorded = collect_writes(json.dumps(event).encode() for event in events)
    assert [write.method for write in recorded["samples-0"]] == ["PATCH"]
    sample = {"name": "sample-0000", "namespace": "samples-0", "uid": "u-sample"}
    resource = {"name": "model-0007", "namespace": "team-7", "uid": "u-7"}
    (write,) = retarget(recorded["samples-0"], sample, resource)
    assert write == Write(
        "PATCH",
        "/api/v1/namespaces/team-7/services/model-0007?force=true",
        json.dumps({"metadata": {"name": "model-0007", "ownerReferences": [{"uid": "u-7"}]}}),
    )


def make_run(**changes: Any) -> Run:
    quiet = Phase(60.0, 0.1, 0.2, [Call("get", "leases", 200), Call("update", "leases", 200)])
    usage = Usage(cpu_seconds=30.0, resident_bytes=120_000_000, peak_bytes=140_000_000)
    values: dict[str, Any] = {
        "cold": Phase(50.0, 20.0, 40.0, [Call("patch", "services", 201)]),
        "children": {"services": 3},
        "rest": quiet,
        "changes": quiet,
        "change_seconds": [0.1] * 99 + [0.9],
        "restart": quiet,
        "cold_usage": usage,
        "usage": usage,
        "changed_usage": usage,
        "restart_usage": usage,
    }
    return Run(**{**values, **changes})


def test_verdicts() -> None:
    assert all(verdict.is_met for verdict in judge(make_run()))
    slow = Phase(61.0, 0.0, 0.0, [Call("patch", "services", 200)])
    large = Usage(cpu_seconds=0, resident_bytes=151_000_000, peak_bytes=151_000_000)
    bad = make_run(
        cold=slow,
        rest=slow,
        restart=slow,
        change_seconds=[0.6] * 9,
        usage=large,
        changed_usage=large,
        restart_usage=large,
    )
    assert not any(verdict.is_met for verdict in judge(bad))


def test_percentiles() -> None:
    assert compute_percentile([3.0], 99) == 3.0
    assert compute_percentile([float(number) for number in range(101)], 99) == 99.0


def test_the_result_says_whether_the_goals_apply() -> None:
    baseline = Baseline(seconds=25.0, writes=10, api_server_cpu_seconds=30.0)
    result = build_result(Plan(20, 5, 1.0), make_run(), baseline, cores=2, load=1.0)
    assert not result["goals_apply"]
    assert result["baseline"]["cold_ratio"] == 2.0
    assert result["rest"]["writes"] == 0
    assert "| bare client | 25.0 |" in build_table(result)
    assert build_result(Plan(1000, 5, 1.0), make_run(), None, cores=2, load=1.0)["goals_apply"]


@pytest.mark.cluster
def test_a_small_run(tmp_path: Path) -> None:
    """Twenty resources on an API server of the bench's own; no figure of time is judged."""
    output = tmp_path / "operator.json"
    arguments = ["--resources", "20", "--changes", "5", "--rest-seconds", "3", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "e2e.bench.operator", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["children"]["deployments"] == 60
    assert (result["rest"]["writes"], result["restart"]["writes"]) == (0, 0)
    assert result["change"]["samples"] == 5
    reads = result["cold"]["calls"]["get"].keys()
    assert not reads & result["children"].keys(), "a new child costs one request"
    assert result["baseline"]["writes"] == result["cold"]["writes"], "the bare client sends what the operator sends"
