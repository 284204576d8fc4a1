"""Every child, in full, against reviewed YAML.

After an intended change: ``BIDIKV_UPDATE_GOLDEN=1 pytest operator -k golden``, then review the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from bidikv_operator.build import build_all
from bidikv_operator.tests.samples import EFA, TCP, make_resource, resolve

GOLDEN = Path(__file__).parent / "golden"
EVERYTHING = make_resource(
    model={
        "source": {"persistentVolumeClaim": {"claimName": "models", "path": "moe"}},
        "servedName": "moe",
        "loraAdapters": [
            {"name": "law", "source": {"persistentVolumeClaim": {"claimName": "adapters", "path": "law"}}},
            {"name": "code", "source": {"path": "/opt/adapters/code"}},
        ],
        "maxLoraRank": 64,
    },
    imagePullPolicy="IfNotPresent",
    fabric={"type": "EFA", "instanceType": "p6-b200.48xlarge", "hugePagesMebibytes": 0},
    kvReuse={"mode": "Bidirectional", "retention": {"policy": "SessionAware", "budgetPercent": 40, "idleSeconds": 300}},
    prefill={
        "replicas": 2,
        "tensorParallelSize": 2,
        "dataParallelSize": 4,
        "expertParallel": "Enabled",
        "resources": {"cpu": 48, "memory": "512Gi"},
        "scheduling": {
            "nodeSelector": {"pool": "inference"},
            "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "system-node-critical",
            "topologyKey": "example.com/rack",
        },
    },
    decode={"replicas": 2, "tensorParallelSize": 4, "dataParallelSize": 2, "expertParallel": "Enabled"},
    router={
        "replicas": 2,
        "resources": {"cpu": 2, "memory": "2Gi"},
        "tlsSecretName": "certificate",
        "accessLog": "Enabled",
        "tracing": {"endpoint": "http://collector:4318/v1/traces", "samplePercent": 5},
        "limits": {"maximumQueuedTurns": 64, "queueSeconds": 20},
        "service": {"type": "LoadBalancer", "annotations": {"cloud.example/internal": "true"}},
    },
    autoscaling={"mode": "Disabled", "objectives": {"timeToFirstTokenP90Milliseconds": 500}},
    monitoring={"podMonitor": "Enabled", "labels": {"release": "prometheus"}},
    security={"metricsFrom": {"namespaceLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    updateStrategy={"drainSeconds": 300},
)
CLAIMS = make_resource(
    model={
        "source": {"huggingFace": {"repository": "Qwen/Qwen3-32B"}},
        "cache": {"persistentVolumeClaimName": "hub"},
    },
    fabric={"type": "EFA", "instanceType": "p5.48xlarge", "devices": "ResourceClaim", "privileged": "Enabled"},
    prefill={"replicas": 2, "tensorParallelSize": 2},
    decode={"replicas": 1, "tensorParallelSize": 4},
    security={"networkPolicy": "Disabled", "podSecurity": "Unrestricted"},
)
NODES = make_resource(
    fabric={"type": "EFA", "instanceType": "p6e-gb200.36xlarge"},
    prefill={"replicas": 2, "tensorParallelSize": 8, "nodesPerReplica": 2},
    decode={"replicas": 2, "tensorParallelSize": 4},
    router={"replicas": 1},
)
CASES = {"tcp": TCP, "efa": EFA, "everything": EVERYTHING, "claims": CLAIMS, "nodes": NODES}


class PlainDumper(yaml.SafeDumper):
    """YAML without anchors: equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(case: str) -> dict[str, str]:
    """File name to YAML text of each child."""
    found = {}
    for kind, manifest in build_all(resolve(CASES[case])):
        name = f"{case}/{kind.kind.lower()}-{manifest['metadata']['name']}.yaml"
        assert name not in found, "two children of one kind and name"
        found[name] = yaml.dump(manifest, Dumper=PlainDumper, sort_keys=False, width=120)
    return found


@pytest.mark.parametrize("case", CASES)
def test_children_equal_the_golden_files(case: str) -> None:
    rendered = render(case)
    folder = GOLDEN / case
    if os.environ.get("BIDIKV_UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.yaml"):
            path.unlink()
        for name, text in rendered.items():
            (GOLDEN / name).write_text(text)
    assert {f"{case}/{path.name}" for path in folder.glob("*.yaml")} == set(rendered)
    for name, text in rendered.items():
        assert (GOLDEN / name).read_text() == text, name


@pytest.mark.parametrize("case", CASES)
def test_order_of_writing(case: str) -> None:
    kinds: list[Any] = [kind.kind for kind, _ in build_all(resolve(CASES[case]))]
    for earlier in ("ServiceAccount", "RoleBinding", "Service"):
        last = max(index for index, kind in enumerate(kinds) if kind == earlier)
        assert last < kinds.index("Deployment")
