"""What Argo CD makes of a resource: its health script on conditions as the operator writes them, its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from bidikv_operator import names
from bidikv_operator.api.crd import FILE_NAME
from e2e.argocd import FOLDER, SCRIPT, read_health
from e2e.install import NAMESPACE, ROOT
from e2e.kubectl import Manifest


def make(ready: str, progressing: str, degraded: str, *, generation: int = 2, observed: int = 2) -> Manifest:
    statuses = {names.READY: ready, names.PROGRESSING: progressing, names.DEGRADED: degraded}
    conditions = [
        {"type": kind, "status": status, "reason": f"{kind}Reason", "message": f"{kind} words"}
        for kind, status in statuses.items()
    ]
    return {
        "metadata": {"generation": generation},
        "spec": {},
        "status": {"observedGeneration": observed, "conditions": conditions},
    }


@pytest.mark.parametrize(
    ("ready", "progressing", "degraded", "health", "told_by"),
    [  # the rows of operator/bidikv_operator/status/summary.py
        ("True", "False", "False", "Healthy", "Ready"),
        ("True", "True", "False", "Progressing", "Progressing"),
        ("True", "True", "True", "Degraded", "Degraded"),
        ("True", "False", "True", "Degraded", "Degraded"),
        ("False", "True", "False", "Progressing", "Progressing"),
        ("False", "True", "True", "Degraded", "Degraded"),
        ("False", "False", "True", "Degraded", "Degraded"),
        ("False", "False", "False", "Healthy", "Ready"),
    ],
)
def test_health(ready: str, progressing: str, degraded: str, health: str, told_by: str) -> None:
    assert read_health(make(ready, progressing, degraded)) == (health, f"{told_by}Reason: {told_by} words")


UNSEEN = ("Progressing", "the operator has not seen this change yet")


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ({"metadata": {"generation": 1}, "spec": {}}, UNSEEN),
        ({"metadata": {"generation": 1}}, UNSEEN),
        ({"metadata": {"generation": 1}, "spec": {}, "status": {}}, UNSEEN),
        ({"metadata": {"generation": 1}, "spec": {}, "status": {"conditions": []}}, UNSEEN),
        (make("True", "False", "False", observed=1), UNSEEN),
        (
            {"metadata": {"generation": 1}, "spec": {}, "status": {"observedGeneration": 1, "conditions": []}},
            ("Progressing", "Progressing is not told"),
        ),
        (
            {**make("True", "False", "True"), "spec": {"paused": True}},
            ("Suspended", "spec.paused is true: nothing is changed"),
        ),
    ],
)
def test_health_of_what_is_not_told_yet_or_paused(resource: Manifest, expected: tuple[str, str]) -> None:
    assert read_health(resource) == expected


def test_the_configuration_holds_the_script() -> None:
    data: dict[str, Any] = yaml.safe_load((FOLDER / "argocd-cm.yaml").read_text())["data"]
    kind = f"{names.GROUP}_{names.KIND}"
    assert data.keys() == {
        f"resource.customizations.health.{kind}",
        f"resource.customizations.ignoreDifferences.{kind}",
    }
    assert data[f"resource.customizations.health.{kind}"] == SCRIPT.read_text()


def test_what_an_autoscaler_writes_is_what_the_scale_subresource_names() -> None:
    data = yaml.safe_load((FOLDER / "argocd-cm.yaml").read_text())["data"]
    ignored = yaml.safe_load(data[f"resource.customizations.ignoreDifferences.{names.GROUP}_{names.KIND}"])
    definition = yaml.safe_load((ROOT / "crds" / FILE_NAME).read_text())
    [version] = definition["spec"]["versions"]
    assert ignored == {"jsonPointers": [version["subresources"]["scale"]["specReplicasPath"].replace(".", "/")]}


def test_the_applications() -> None:
    operator, models = yaml.safe_load_all((FOLDER / "applications.yaml").read_text())
    assert operator["spec"]["source"]["path"] == "charts/bidikv"
    assert operator["spec"]["destination"]["namespace"] == NAMESPACE
    for application in (operator, models):
        assert "ServerSideApply=true" in application["spec"]["syncPolicy"]["syncOptions"]
    assert "RespectIgnoreDifferences=true" in models["spec"]["syncPolicy"]["syncOptions"]
