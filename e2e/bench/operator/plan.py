"""Which resources the bench makes and which changes it asks for. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from bidikv_operator import names

Object = dict[str, Any]

NAMESPACES: Final = 10
RUNTIME_IMAGE: Final = "registry.example/bidikv/runtime:bench"
SEED: Final = 1
SAMPLES: Final = 2
"""Different specs among the resources."""


@dataclass(frozen=True)
class Plan:
    resources: int
    changes: int
    rest_seconds: float
    """For how long the operator is watched while nothing changes."""


FULL: Final = Plan(resources=1000, changes=200, rest_seconds=60.0)


def build_namespaces(count: int = NAMESPACES) -> list[str]:
    return [f"team-{number}" for number in range(count)]


def build_resource(number: int) -> Object:
    """Of even number on TCP, of odd number on EFA; spread over the namespaces."""
    name, namespaces = f"model-{number:04d}", build_namespaces()
    spec: Object = {
        "model": {
            "source": {"huggingFace": {"repository": "Qwen/Qwen3-32B", "revision": "main", "tokenSecretName": "hub"}},
            "servedName": "qwen3-32b",
            "maxLength": 32768,
        },
        "image": "vllm/vllm-openai:v0.32.0",
        "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge"} if number % SAMPLES else {"type": "TCP"},
        "kvReuse": {"mode": "Bidirectional"},
        "prefill": {"replicas": 2, "tensorParallelSize": 4, "extraArgs": ["--max-num-batched-tokens", "8192"]},
        "decode": {
            "replicas": 2,
            "tensorParallelSize": 4,
            "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "WARNING"}],
            "podTemplate": {"spec": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}},
        },
        "router": {"replicas": 2},
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespaces[number % len(namespaces)]},
        "spec": spec,
    }


def get_number(resource: Object) -> int:
    """That from which ``build_resource`` made it."""
    return int(resource["metadata"]["name"].rpartition("-")[2])


def build_sample(number: int) -> Object:
    """Like the resource of that number, under a name and in a namespace that occur nowhere else."""
    resource = build_resource(number)
    return {**resource, "metadata": {"name": f"sample-{number:04d}", "namespace": f"samples-{number}"}}


@dataclass(frozen=True)
class Change:
    """Set the number of router pods of one resource: a change that one child has to follow."""

    namespace: str
    name: str
    replicas: int

    @property
    def patch(self) -> Object:
        return {"spec": {"router": {"replicas": self.replicas}}}


def plan_changes(plan: Plan, seed: int = SEED) -> Iterator[Change]:
    """Changes of random resources; each differs from what the resource had before."""
    choose = random.Random(seed)
    present: dict[int, int] = {}
    for _ in range(plan.changes):
        number = choose.randrange(plan.resources)
        present[number] = 3 if present.get(number, 2) == 2 else 2
        metadata = build_resource(number)["metadata"]
        yield Change(metadata["namespace"], metadata["name"], present[number])
