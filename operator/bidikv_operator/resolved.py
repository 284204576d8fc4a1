"""A resource after validation: every default filled in, every choice made.

The only input of the builders: nothing behind ``validate`` reads the resource's spec again. ``identity`` is computed
from what the user wrote, not from the values here, or a new operator with a new default would restart engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bidikv_operator.names import PREFILL, Role
from bidikv_operator.rollout.revision import Identity
from bidikv_runtime.contract import Fabric, MissingPrefill, ReuseMode


@dataclass(frozen=True, kw_only=True)
class ResolvedAdapter:
    """One LoRA adapter; ``path`` is what vLLM loads: repository on the hub, or a path inside the container."""

    name: str
    path: str
    claim_name: str | None = None


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
    cache_claim_name: str | None = None
    """PersistentVolumeClaim on which downloads from the hub are kept; an emptyDir when None."""
    adapters: tuple[ResolvedAdapter, ...] = ()
    max_lora_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class ResolvedFabric:
    type: Fabric
    instance_type: str | None = None
    devices: Literal["DevicePlugin", "ResourceClaim"] = "DevicePlugin"
    gpu_device_class: str = "gpu.nvidia.com"
    efa_device_class: str = "efa.networking.k8s.aws"
    privileged: bool = False
    huge_pages_mebibytes: int = 5120
    """Per pod, with EFA; 0 for none."""
    minimum_gigabits_per_second: int | None = None
    """Floor of the measured bandwidth between two engines; None: any."""
    gates_ready: bool = False
    """Whether Ready wants TransportVerified."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Requests and limits of a container besides accelerators, as Kubernetes quantities in canonical form."""

    cpu: str | None = None
    memory: str | None = None


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class_name: str | None = None
    scheduler_name: str | None = None
    topology_key: str | None = None
    """All pods of both engine roles in one domain of this node label."""


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    replicas: int
    """After the bounds of autoscaling."""
    tensor_parallel_size: int
    gpus: int
    """``nvidia.com/gpu`` per pod; 0 asks for none."""
    interfaces: int
    """EFA interfaces per pod; 0 asks for none."""
    extra_args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    pod_template: Mapping[str, Any]
    data_parallel_size: int = 1
    """Ranks in one replica, each with a KV cache of its own; all of them in one pod."""
    expert_parallel: bool = False
    nodes: int = 1
    """Pods of one replica; with more than one, the role is a LeaderWorkerSet."""
    resources: Resources = field(default_factory=Resources)
    scheduling: Scheduling = field(default_factory=Scheduling)


@dataclass(frozen=True, kw_only=True)
class ResolvedRouter:
    replicas: int
    pod_template: Mapping[str, Any]
    resources: Resources = field(default_factory=Resources)
    scheduling: Scheduling = field(default_factory=Scheduling)
    local_limit_tokens: int = 512
    missing_prefill: MissingPrefill = "Decode"
    continue_streams: bool = False
    isolate_tenants: bool = False
    tls_secret_name: str | None = None
    access_log: bool = False
    trace_endpoint: str = ""
    trace_percent: int = 100
    debug: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    """Flags of the router's ``limits.py`` (without ``--``) and their values, as the resource sets them."""
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    service_annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResolvedRetention:
    policy: Literal["SessionAware", "LRU"] | None = None
    """None: the connector's own default."""
    budget_percent: int | None = None
    idle_seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class ResolvedMonitoring:
    pod_monitor: bool = False
    interval_seconds: int = 30
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResolvedObjectives:
    """What users should feel, at the 90th percentile; None: no objective."""

    time_to_first_token_milliseconds: int | None = None
    inter_token_latency_milliseconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class ResolvedScaling:
    """What autoscaling says: bounds are applied already; ``asked`` is what the spec wants without them."""

    mode: Literal["Disabled", "External"] = "Disabled"
    objectives: ResolvedObjectives = field(default_factory=ResolvedObjectives)
    asked: Mapping[str, int] = field(default_factory=dict)
    minimum: Mapping[str, int] = field(default_factory=dict)
    """By role; empty when Disabled."""
    maximum: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResolvedUpdates:
    """How pods are replaced. Counts are pods of one role, or percent of its replicas (``"25%"``)."""

    max_surge: int | str = 0
    max_unavailable: int | str = 1
    progress_deadline_seconds: int = 4200
    drain_seconds: int = 120
    """How long a stopping engine waits for the next turns of its sessions."""


@dataclass(frozen=True, kw_only=True)
class ResolvedSecurity:
    network_policy: bool = True
    metrics_namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Pods in namespaces with all of these labels may read engines' metrics; empty: only routers, engines, operator."""
    restricted: bool = True
    """Engines run as a user of their own, without privileges that their fabric does not need."""
    token_rotation_days: int = 0
    """Age at which the peers' token is replaced; 0: only when told to."""
    token_rotation: str = ""
    """Any text; another one replaces the token."""


@dataclass(frozen=True, kw_only=True)
class ResolvedHealing:
    enabled: bool = True
    per_hour: int = 4
    """Most pods deleted within an hour because their peers cannot reach them."""
    unreachable_seconds: int = 60


@dataclass(frozen=True, kw_only=True)
class Resolved:
    namespace: str
    name: str
    uid: str
    identity: Identity
    model: ResolvedModel
    image: str
    runtime_image: str
    """Of router and connector: the resource's, else the operator's."""
    image_pull_secrets: tuple[str, ...]
    fabric: ResolvedFabric
    reuse: ReuseMode
    prefill: ResolvedEngine
    decode: ResolvedEngine
    router: ResolvedRouter
    image_pull_policy: str | None = None
    retention: ResolvedRetention = field(default_factory=ResolvedRetention)
    scaling: ResolvedScaling = field(default_factory=ResolvedScaling)
    monitoring: ResolvedMonitoring = field(default_factory=ResolvedMonitoring)
    updates: ResolvedUpdates = field(default_factory=ResolvedUpdates)
    security: ResolvedSecurity = field(default_factory=ResolvedSecurity)
    healing: ResolvedHealing = field(default_factory=ResolvedHealing)
    paused: bool = False
    operator_namespace: str = ""
    """Where the operator runs, for NetworkPolicies; empty: not in a cluster."""

    def engine(self, role: Role) -> ResolvedEngine:
        """Of ``prefill`` or ``decode``."""
        return self.prefill if role == PREFILL else self.decode
