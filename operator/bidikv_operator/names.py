"""Every name the operator gives to something in the API: labels, annotations, conditions, reasons, children.

One place for each name: a builder, a test or the chart never spells one out again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Literal

GROUP: Final = "serving.bidikv.io"
VERSION: Final = "v1alpha1"
KIND: Final = "BidiKVInference"
PLURAL: Final = "bidikvinferences"
SINGULAR: Final = "bidikvinference"
SHORT_NAME: Final = "bidikv"
CATEGORY: Final = "bidikv-all"
"""Not the short name: kubectl reads a category first, and refuses ``get <category> NAME`` once it holds two kinds."""
API_VERSION: Final = f"{GROUP}/{VERSION}"
CRD_NAME: Final = f"{PLURAL}.{GROUP}"

FIELD_MANAGER: Final = "bidikv-operator"
MANAGED_BY: Final = "bidikv-operator"

# --- labels and annotations -------------------------------------------------------------------------------------------
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_OWNER: Final = f"{GROUP}/owner"
"""Name of the BidiKVInference that a child belongs to. Child watches select on it."""
LABEL_ROLE: Final = f"{GROUP}/role"
ANNOTATION_APPLIED_HASH: Final = f"{GROUP}/applied-hash"
"""On every child: hash of the whole object as it was applied. Tells a later process what the earlier one wanted."""

LABEL_GROUP: Final = f"{GROUP}/group"
"""On engine pods and what makes them: engines of one group were made to exchange KV (``revision.py``)."""
ANNOTATION_INPUT: Final = f"{GROUP}/input"
"""On what makes engine pods: hash of the part of the spec that their template was built from."""
ANNOTATION_DEVICES: Final = f"{GROUP}/devices"
"""On engine pods that claim their devices: what one claim holds, as JSON (``build/devices.py``)."""
ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: of two pods a scale-down removes the one of lower cost."""
TOKEN_SECRET: Final = "peer-token"
"""Suffix of the Secret with the peers' tokens."""
ANNOTATION_TOKEN_PHASE: Final = f"{GROUP}/token-phase"
"""On that Secret: how far a rotation is (``peer_token.py``)."""
ANNOTATION_TOKEN_SINCE: Final = f"{GROUP}/token-since"
"""On it: since when, in UTC."""
ANNOTATION_TOKEN_ROTATION: Final = f"{GROUP}/token-rotation"
"""On it: digest of the text in the resource that last asked for a rotation."""

# --- roles ------------------------------------------------------------------------------------------------------------
Role = Literal["prefill", "decode", "router"]
PREFILL: Final = "prefill"
DECODE: Final = "decode"
ROUTER: Final = "router"
ENGINE_CONTAINER: Final = "engine"
ROUTER_CONTAINER: Final = "router"
INSTALL_CONTAINER: Final = "install-connector"

ENGINE_ROLES: Final[tuple[Role, ...]] = (PREFILL, DECODE)
ROLES: Final[tuple[Role, ...]] = (PREFILL, DECODE, ROUTER)

WORKER_LABELS: Final[dict[Role, str]] = {"prefill": "prefill-worker", "decode": "decode-worker"}
"""Values of ``LABEL_ROLE`` on the pods of a multi-node replica behind the first one: they serve no port, so that no
Service, poll or budget of the role may take them for engines."""

# --- conditions -------------------------------------------------------------------------------------------------------
ACCEPTED: Final = "Accepted"
PREFILL_READY: Final = "PrefillReady"
DECODE_READY: Final = "DecodeReady"
ROUTER_READY: Final = "RouterReady"
PROGRESSING: Final = "Progressing"
READY: Final = "Ready"
TRANSPORT_VERIFIED: Final = "TransportVerified"
SCALING: Final = "Scaling"
DEGRADED: Final = "Degraded"
CONDITION_TYPES: Final = (
    ACCEPTED,
    PREFILL_READY,
    DECODE_READY,
    ROUTER_READY,
    TRANSPORT_VERIFIED,
    SCALING,
    PROGRESSING,
    DEGRADED,
    READY,
)
ROLE_CONDITIONS: Final[dict[Role, str]] = {"prefill": PREFILL_READY, "decode": DECODE_READY, "router": ROUTER_READY}

# --- reasons of conditions --------------------------------------------------------------------------------------------
REASON_VALID: Final = "Valid"
REASON_INVALID: Final = "Invalid"
REASON_ALL_READY: Final = "AllReplicasReady"
REASON_ENOUGH_READY: Final = "EnoughReplicasReady"
"""Fewer than asked for, but no fewer than a rollout may leave (``updateStrategy.maxUnavailable``)."""
REASON_SCALED_TO_ZERO: Final = "ScaledToZero"
REASON_NOT_CREATED: Final = "NotCreated"
REASON_STARTING: Final = "Starting"
REASON_ROLLING_OUT: Final = "RollingOut"
REASON_ROLLED_OUT: Final = "RolledOut"
REASON_STALLED: Final = "Stalled"
REASON_APPLY_FAILED: Final = "ApplyFailed"
REASON_NAME_TAKEN: Final = "NameTaken"
REASON_WAITING_FOR_DELETION: Final = "WaitingForDeletion"
REASON_UNSCHEDULABLE: Final = "Unschedulable"
REASON_IMAGE_PULL_FAILED: Final = "ImagePullFailed"
REASON_CONTAINER_CONFIG: Final = "ContainerConfigError"
REASON_OUT_OF_MEMORY: Final = "OutOfMemory"
REASON_CRASHING: Final = "ContainerCrashing"
REASON_POD_CREATION_FAILED: Final = "PodCreationFailed"
REASON_READY: Final = "Ready"
REASON_WAITING_FOR_LEAVING_PODS: Final = "WaitingForStoppingPods"
"""New pods need accelerators that stopping pods of the same resource still hold."""
REASON_NO_PAIR: Final = "NoPairOfOneGroup"
"""Prefill and decode pods are ready, but none of a group with one of the other role."""
REASON_VERIFYING: Final = "VerifyingTransport"
"""Ready waits for the engines' word on their transport."""
REASON_PULL_DENIED: Final = "ImagePullDenied"
REASON_EVICTED: Final = "PodEvicted"
REASON_NOT_ANSWERING: Final = "PodNotAnswering"
REASON_PAUSED: Final = "Paused"
REASON_ROLLOUT_FAILED: Final = "RolloutFailed"
REASON_DEPLOYMENT_PAUSED: Final = "DeploymentPaused"
"""Somebody paused a child (``kubectl rollout pause``), and pods lack their newest template because of that."""
REASON_KIND_MISSING: Final = "KindNotServed"
"""The cluster lacks an optional kind that the resource asks for (LeaderWorkerSet, PodMonitor)."""

# of TransportVerified
REASON_VERIFIED: Final = "Verified"
REASON_FELL_BACK: Final = "FellBackToTCP"
REASON_WRONG_BACKEND: Final = "WrongBackend"
REASON_BELOW_FLOOR: Final = "BelowFloor"
REASON_NO_TRAFFIC: Final = "NoTraffic"
REASON_NO_REPORTS: Final = "NoReports"

# of Scaling
REASON_DISABLED: Final = "Disabled"
REASON_WITHIN_BOUNDS: Final = "WithinBounds"
REASON_AT_MINIMUM: Final = "AtMinimum"
REASON_AT_MAXIMUM: Final = "AtMaximum"

# of Degraded
REASON_AS_EXPECTED: Final = "AsExpected"
REASON_UNREACHABLE: Final = "EnginesUnreachable"
REASON_RECYCLED: Final = "EngineRecycled"
REASON_TOKEN_ROTATED: Final = "PeerTokenRotated"
"""Of an Event only."""
REASON_MODEL_NOT_FOUND: Final = "ModelNotFound"
REASON_ACCESS_DENIED: Final = "ModelAccessDenied"
REASON_HUB_UNREACHABLE: Final = "ModelHubUnreachable"


def find_engine_role(obj: Mapping[str, Any]) -> Role | None:
    """The engine role that an object's label names; None for anything else, workers of multi-node replicas included."""
    label = (obj["metadata"].get("labels") or {}).get(LABEL_ROLE)
    return next((role for role in ENGINE_ROLES if label == role), None)


def child_name(owner: str, suffix: str, limit: int = 63) -> str:
    """``owner-suffix``, shortened with a hash of the owner when it would pass ``limit`` (a DNS label)."""
    name = f"{owner}-{suffix}"
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(owner.encode()).hexdigest()[:8]
    return f"{owner[: limit - len(suffix) - 10].rstrip('-.')}-{digest}-{suffix}"
