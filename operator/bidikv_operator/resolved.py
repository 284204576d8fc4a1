"""A resource after validation: every default filled in, every choice made.

The only input of the builders. Nothing behind ``validate.py`` reads the resource's spec again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bidikv_runtime.contract import Fabric, ReuseMode


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    argument: str
    """Value of vLLM's ``--model``: repository on the hub, or a path inside the container."""
    served_name: str
    max_length: int | None = None
    revision: str | None = None
    token_secret_name: str | None = None
    claim_name: str | None = None
    """PersistentVolumeClaim mounted read-only below ``argument``."""


@dataclass(frozen=True, kw_only=True)
class ResolvedFabric:
    type: Fabric
    instance_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    replicas: int
    tensor_parallel_size: int
    gpus: int
    """``nvidia.com/gpu`` per pod; 0 asks for none."""
    interfaces: int
    """EFA interfaces per pod; 0 asks for none."""
    extra_args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    pod_template: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResolvedRouter:
    replicas: int
    pod_template: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    namespace: str
    name: str
    uid: str
    model: ResolvedModel
    image: str
    runtime_image: str
    image_pull_secrets: tuple[str, ...]
    fabric: ResolvedFabric
    reuse: ReuseMode
    prefill: ResolvedEngine
    decode: ResolvedEngine
    router: ResolvedRouter
