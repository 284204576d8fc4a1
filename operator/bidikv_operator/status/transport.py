"""TransportVerified: whether KV moves between the engines as the fabric promises, from their own reports. Pure.

| Status | Reason | When |
| --- | --- | --- |
| True | Verified | all engines that report use the fabric's backend and provider, and KV has moved with it |
| False | WrongBackend | an engine uses another NIXL backend, or its backend moves bytes with something unexpected |
| False | FellBackToTCP | EFA is asked for and LIBFABRIC moves bytes over TCP |
| False | BelowFloor | the bandwidth measured at the first contact of two engines is below the resource's floor |
| False | NoTraffic | an engine has tried to read and has never succeeded |
| Unknown | NoTraffic | nothing has been read yet: requests decide |
| Unknown | NoReports | no engine runs, or none tells |

The first row from the top that holds wins, after the False ones. Bandwidth is that of one rank (GPU): each reads its
own shard by itself, and the slowest rank and peer count. Sentences name roles, never pods, and figures are rounded to
one digit, so that a condition changes only when something did.

A new leader has asked nobody yet: until it has, what the condition said before stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.engines.reach import is_fresh, is_pending
from bidikv_operator.resolved import ResolvedFabric
from bidikv_operator.state import EngineFacts
from bidikv_operator.status.conditions import Condition, ConditionStatus
from bidikv_runtime.contract import BACKENDS, STATE_PORT, TransportReport

FAILED_READS: Final = 3
"""So many failed reads and none that succeeded are no coincidence."""
GIGABIT: Final = 1e9 / 8

_EXPECTED_PROVIDERS: Final[dict[str, tuple[str, ...]]] = {
    "EFA": ("efa",),
    # UCX over another RDMA device than EFA is no slower than TCP, whose name stands for "whatever the nodes have".
    "TCP": ("tcp", "rdma", "unknown"),
}
_REMEDY: Final[dict[str, str]] = {
    "EFA": "give the pods EFA interfaces and use an image whose NIXL has LIBFABRIC and which has the EFA software",
    "TCP": "use an image whose NIXL has UCX, and give the pods no EFA device unless the fabric is EFA",
}


def find_condition(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The live TransportVerified of a resource's status."""
    conditions = status.get("conditions") or []
    return next((found for found in conditions if found.get("type") == names.TRANSPORT_VERIFIED), None)


def compute_transport(
    engines: Sequence[EngineFacts], fabric: ResolvedFabric, previous: Mapping[str, Any] | None
) -> Condition:
    """The condition.

    Args:
        engines: those that run.
        fabric: what the resource asks for.
        previous: the live condition, as the API tells it.
    """
    verdict = _judge(engines, fabric)
    if verdict.status != "False" and previous is not None and any(map(is_pending, engines)):
        return Condition(names.TRANSPORT_VERIFIED, previous["status"], previous["reason"], previous["message"])
    return verdict


def compute_transport_facts(
    engines: Sequence[EngineFacts], previous: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """``status.transport``: backend, provider and rounded bandwidth; None before an engine has told.

    Where engines differ, it is what most of them tell; the condition names the others.
    """
    if previous is not None and any(map(is_pending, engines)):
        return dict(previous)
    told = [transport for one in engines if is_fresh(one) and (transport := _transport(one)) is not None]
    if not told:
        return None
    kinds = [(transport.backend, transport.provider) for transport in told]
    backend, provider = max(sorted(set(kinds)), key=kinds.count)
    facts: dict[str, Any] = {"backend": backend, "provider": provider}
    rates = [transport.bandwidth for transport in told if transport.bandwidth > 0]
    if rates and (gigabits := round(_round_coarsely(min(rates) / GIGABIT))) > 0:
        facts["gigabitsPerSecond"] = gigabits
    return facts


def _judge(engines: Sequence[EngineFacts], fabric: ResolvedFabric) -> Condition:
    fresh = [one for one in engines if is_fresh(one)]
    if not fresh:
        return _build("Unknown", names.REASON_NO_REPORTS, _explain_no_reports(engines))
    told = [(one, transport) for one in fresh if (transport := _transport(one)) is not None]
    backend = BACKENDS[fabric.type]
    if wrong := [(one, transport) for one, transport in told if transport.backend != backend]:
        text = f"{_name(wrong)} read KV with {wrong[0][1].backend} instead of {backend}: {_REMEDY[fabric.type]}"
        return _build("False", names.REASON_WRONG_BACKEND, text)
    expected = _EXPECTED_PROVIDERS[fabric.type]
    if wrong := [(one, transport) for one, transport in told if transport.provider not in expected]:
        provider = wrong[0][1].provider
        text = f"{_name(wrong)} read KV with {backend} over {provider} instead of {expected[0]}: {_REMEDY[fabric.type]}"
        return _build("False", names.REASON_FELL_BACK if provider == "tcp" else names.REASON_WRONG_BACKEND, text)
    if slow := _find_slow(told, fabric):
        return slow
    failing = [
        (one, transport)
        for one, transport in told
        if transport.read_bytes == 0 and transport.failed_reads >= FAILED_READS
    ]
    if failing:
        text = (
            f"{_name(failing)} could read no KV from any peer, so everything is computed anew: let all ports be open "
            "between the engines (NetworkPolicies; with EFA also the security group, for itself), see the engines' logs"
        )
        return _build("False", names.REASON_NO_TRAFFIC, text)
    if not any(transport.read_bytes for _, transport in told):
        text = "no KV has moved between engines yet; the first requests that need it decide"
        return _build("Unknown", names.REASON_NO_TRAFFIC, text)
    providers = sorted({transport.provider for _, transport in told})
    text = f"KV moves with {backend} over {' and '.join(providers)}"
    if rate := _find_slowest(told):
        text += f", at about {_write(rate)} Gb/s per rank between the slowest peers"
    return _build("True", names.REASON_VERIFIED, text)


def _find_slow(told: Sequence[tuple[EngineFacts, TransportReport]], fabric: ResolvedFabric) -> Condition | None:
    floor = fabric.minimum_gigabits_per_second
    slow = [(one, transport) for one, transport in told if 0 < transport.bandwidth < (floor or 0) * GIGABIT]
    if not slow:
        return None
    text = (
        f"{_name(slow)} read KV at about {_write(_find_slowest(slow))} Gb/s per rank, below the floor of {floor} Gb/s: "
        "see whether the pods are in one zone and have all interfaces of their GPUs, or lower "
        "spec.fabric.verification.minimumGigabitsPerSecond"
    )
    return _build("False", names.REASON_BELOW_FLOOR, text)


def _explain_no_reports(engines: Sequence[EngineFacts]) -> str:
    if not engines:
        return "no engine runs"
    faults = {one.fault for one in engines}
    if "refused" in faults:
        return "the engines refuse the operator's token, which they should accept within minutes of its rotation"
    if "malformed" in faults:
        return "the engines' reports cannot be read: use a runtime image of the operator's release"
    if "silent" in faults:
        return f"the engines do not answer the operator: let it reach their port {STATE_PORT} (NetworkPolicies)"
    return "the engines have not been asked yet"


def _transport(one: EngineFacts) -> TransportReport | None:
    return one.report.transport if one.report is not None else None


def _find_slowest(told: Iterable[tuple[EngineFacts, TransportReport]]) -> float:
    """Bytes a second; 0 when none was measured."""
    return min((transport.bandwidth for _, transport in told if transport.bandwidth > 0), default=0.0)


def _name(engines: Iterable[tuple[EngineFacts, TransportReport]]) -> str:
    roles = sorted({one.role for one, _ in engines}, reverse=True)
    return f"{' and '.join(roles)} engines"


def _write(rate: float) -> str:
    return f"{_round_coarsely(rate / GIGABIT):g}"


def _round_coarsely(number: float) -> float:
    """To one significant digit."""
    return round(number, -math.floor(math.log10(number))) if number > 0 else 0.0


def _build(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(names.TRANSPORT_VERIFIED, status, reason, message)
