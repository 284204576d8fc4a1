"""The conditions that sum up: Progressing, Degraded and Ready. Pure.

Ready says whether users are served, Progressing whether operator or cluster are still at work, Degraded whether
something needs a person's eye. They never contradict each other:

==========  ============  =========  ===============================================================================
Ready       Progressing   Degraded   meaning
==========  ============  =========  ===============================================================================
True        False         False      at rest: all pods are ready and of the newest template
True        True          False      serves; pods are being replaced or added
True        True          True       serves with less than asked for; the cluster still tries (an engine that crashes)
True        False         True       serves; what is wrong needs a person (failed rollout, slow transport, ...)
False       True          False      starts, or waits for nodes
False       True          True       does not serve, the cluster still tries
False       False         True       does not serve and will not without a person
False       False         False      as asked for: a role is scaled to zero, or ``spec.paused`` holds an unready one
==========  ============  =========  ===============================================================================

So neither Ready nor Progressing nor Degraded is the wish of the user only, which is what health checks (Argo CD's
among them) want: Degraded first, then Ready, else it progresses.

Ready is True when the resource is accepted, all its children exist, every role is ready (``roles.py``: at least its
floor), some prefill and some decode pod are of one group, so that KV can flow between them, and, where
``fabric.verification.gate`` says so, the transport is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from bidikv_operator import names
from bidikv_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, POD_MONITOR, RESOURCE_CLAIM_TEMPLATE, Kind
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.plan import Rollout
from bidikv_operator.state import Applied, Failure
from bidikv_operator.status.conditions import Condition
from bidikv_operator.status.roles import RoleView, explain_missing

NO_PAIR: Final = "no prefill pod and decode pod of one group are ready, so KV cannot flow between them"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """All that the summaries depend on."""

    accepted: Condition
    checked: Resolved | None
    """None while the resource is invalid."""
    applied: Applied
    rollout: Rollout
    views: Mapping[names.Role, RoleView]
    roles: tuple[Condition, ...]
    transport: Condition
    missing_kinds: frozenset[Kind]
    healing_reason: str | None
    healing_message: str

    @property
    def is_paused(self) -> bool:
        return self.checked is not None and self.checked.paused


def compute_progressing(picture: Picture) -> Condition:
    name = names.PROGRESSING
    if picture.checked is None:
        message = "nothing is changed while the resource is invalid; correct it as Accepted says"
        return Condition(name, "False", names.REASON_INVALID, message)
    if picture.is_paused:
        message = "nothing is changed while spec.paused is true; remove it to go on"
        return Condition(name, "False", names.REASON_PAUSED, message)
    course = _compute_course(picture)
    # Always: a paused Deployment whose pods lack nothing will not follow the next change.
    paused = [view.pause for view in picture.views.values() if view.pause]
    return replace(course, message="; ".join((course.message, *paused)))


def _compute_course(picture: Picture) -> Condition:
    """Progressing of a resource that is acted on, without what pauses of its children mean for later changes."""
    name = names.PROGRESSING
    if picture.applied.failures:
        return Condition(name, "False", *_explain_failures(picture.applied.failures))
    lacking = _find_missing_kind(picture)
    if lacking is not None:
        return Condition(name, "False", names.REASON_KIND_MISSING, lacking)
    if picture.applied.waiting:
        message = _explain_waiting(sorted(str(ref) for ref in picture.applied.waiting))
        return Condition(name, "True", names.REASON_WAITING_FOR_DELETION, message)
    if _has_failed_rollout(picture):
        return Condition(name, "False", names.REASON_ROLLOUT_FAILED, _explain_failed_rollout(picture))
    held = [role for role, view in picture.views.items() if view.is_held]
    if held:
        message = f"the newest template does not reach all {' and '.join(held)} pods"
        return Condition(name, "False", names.REASON_DEPLOYMENT_PAUSED, message)
    late = [role for role, view in picture.views.items() if view.is_late and not view.is_rolled_out]
    if late:
        listed = " and ".join(late)
        message = f"{listed} made no progress within the deadline; {explain_missing(picture.views[late[0]])}"
        return Condition(name, "False", names.REASON_STALLED, message)
    unfinished = [role for role, view in picture.views.items() if not view.is_rolled_out]
    if unfinished:
        return _explain_unfinished(picture, unfinished)
    if _is_gated(picture) and picture.transport.status == "Unknown":
        message = f"Ready waits for the transport to be verified: {picture.transport.message}"
        return Condition(name, "True", names.REASON_VERIFYING, message)
    return Condition(name, "False", names.REASON_ROLLED_OUT, "all pods are of the newest template")


def compute_degraded(picture: Picture) -> Condition:
    """What needs a person's eye; the most fundamental first."""
    reason, message = next(_iterate_faults(picture), (names.REASON_AS_EXPECTED, "nothing is wrong"))
    return Condition(names.DEGRADED, "False" if reason == names.REASON_AS_EXPECTED else "True", reason, message)


def compute_ready(picture: Picture) -> Condition:
    name = names.READY
    if picture.accepted.status != "True":
        return Condition(name, "False", picture.accepted.reason, picture.accepted.message)
    # A child that could only not be changed still serves; without one of its children the resource does not. Whether
    # there are pods that serve is for the roles to say: earlier engines do while newer ones are refused.
    missing = tuple(
        failure
        for failure in picture.applied.failures
        if failure.reason == names.REASON_NAME_TAKEN
        or (failure.ref not in picture.applied.children and failure.ref.kind not in (DEPLOYMENT, LEADER_WORKER_SET))
    )
    if missing:
        return Condition(name, "False", *_explain_failures(missing))
    # Pods that still serve go with their set, as those of a resource that was deleted and created again.
    leaving = sorted(str(ref) for ref in picture.applied.waiting if ref.kind in (DEPLOYMENT, LEADER_WORKER_SET))
    if leaving:
        return Condition(name, "False", names.REASON_WAITING_FOR_DELETION, _explain_waiting(leaving))
    for condition in picture.roles:
        if condition.status != "True":
            return Condition(name, "False", condition.reason, condition.message)
    if not _has_pair(picture.rollout):
        return Condition(name, "False", names.REASON_NO_PAIR, NO_PAIR)
    if _is_gated(picture) and picture.transport.status != "True":
        message = f"spec.fabric.verification wants a verified transport: {picture.transport.message}"
        return Condition(name, "False", picture.transport.reason, message)
    if all(view.is_complete for view in picture.views.values()):
        return Condition(name, "True", names.REASON_READY, "all pods are ready and the endpoint serves")
    message = "the endpoint serves with fewer pods than asked for; Progressing and Degraded tell of the others"
    return Condition(name, "True", names.REASON_READY, message)


def _iterate_faults(picture: Picture) -> Iterator[tuple[str, str]]:
    if picture.checked is None:
        yield (
            names.REASON_INVALID,
            "the resource is invalid, what ran before keeps running; correct it as Accepted says",
        )
    if picture.applied.failures:
        yield _explain_failures(picture.applied.failures)
    lacking = _find_missing_kind(picture)
    if lacking is not None:
        yield names.REASON_KIND_MISSING, lacking
    if picture.healing_reason:
        yield picture.healing_reason, picture.healing_message
    if _has_failed_rollout(picture):
        yield names.REASON_ROLLOUT_FAILED, _explain_failed_rollout(picture)
    for view in picture.views.values():
        if view.is_held and not picture.is_paused:
            yield names.REASON_DEPLOYMENT_PAUSED, view.pause
    for view in picture.views.values():
        if view.fault is not None:
            yield view.fault.reason, f"{view.counted}; {view.fault.message}"
    for view in picture.views.values():
        if view.is_late and not view.is_rolled_out:
            yield names.REASON_STALLED, f"{view.counted}; {explain_missing(view)}"
    if picture.transport.status == "False":
        yield picture.transport.reason, picture.transport.message
    if (
        not picture.is_paused
        and all(condition.status == "True" for condition in picture.roles)
        and all(view.is_rolled_out for view in picture.views.values())
        and not _has_pair(picture.rollout)
    ):
        yield names.REASON_NO_PAIR, NO_PAIR


def _explain_failures(failures: tuple[Failure, ...]) -> tuple[str, str]:
    return failures[0].reason, "; ".join(sorted(str(failure) for failure in failures))


def _explain_waiting(refs: list[str]) -> str:
    return f"waiting for the deletion of earlier objects of the same name: {', '.join(refs)}"


def _has_failed_rollout(picture: Picture) -> bool:
    """Whether engines that are to take the place of others do not come up; without others it is just a slow start."""
    engines = [picture.views[role] for role in names.ENGINE_ROLES]
    return picture.rollout.is_failed and any(view.is_replacing for view in engines)


def _explain_failed_rollout(picture: Picture) -> str:
    """The planner's sentence, why the new pods do not come up, whether anything serves, and the way back."""
    parts = [picture.rollout.message or "the new engines do not come up"]
    parts += [
        f"{view.role}: {view.trouble.message}"
        for view in picture.views.values()
        if view.trouble is not None and not view.is_rolled_out and view.role in names.ENGINE_ROLES
    ]
    if not _has_pair(picture.rollout):
        parts.append(NO_PAIR)
    return "; ".join(parts)


def _explain_unfinished(picture: Picture, unfinished: list[names.Role]) -> Condition:
    replacing = [role for role in unfinished if picture.views[role].is_replacing]
    incomplete = [view for role in unfinished if not (view := picture.views[role]).is_complete]
    told = "; ".join(f"{view.counted}, {explain_missing(view)}" for view in incomplete)
    if replacing:
        message = picture.rollout.message or f"pods of {' and '.join(replacing)} are being replaced"
        return Condition(names.PROGRESSING, "True", names.REASON_ROLLING_OUT, f"{message}; {told}" if told else message)
    message = told or f"pods of {' and '.join(unfinished)} are being brought to what is asked for"
    return Condition(names.PROGRESSING, "True", names.REASON_STARTING, message)


def _has_pair(rollout: Rollout) -> bool:
    ready = [{found.group for found in rollout.of_role(role) if found.ready} for role in names.ENGINE_ROLES]
    return bool(ready[0] & ready[1])


def _is_gated(picture: Picture) -> bool:
    return picture.checked is not None and picture.checked.fabric.gates_ready


def _find_missing_kind(picture: Picture) -> str | None:
    """A kind that the resource asks for and the cluster lacks."""
    checked = picture.checked
    if checked is None:
        return None
    wanted = (
        (
            LEADER_WORKER_SET,
            checked.prefill.nodes > 1 or checked.decode.nodes > 1,
            "install LeaderWorkerSet, or lower nodesPerReplica to 1",
        ),
        (
            RESOURCE_CLAIM_TEMPLATE,
            checked.fabric.devices == "ResourceClaim",
            "use Kubernetes 1.34 or newer, or set spec.fabric.devices to DevicePlugin",
        ),
        (
            POD_MONITOR,
            checked.monitoring.pod_monitor,
            "install the Prometheus operator, or set spec.monitoring.podMonitor to Disabled",
        ),
    )
    for kind, is_asked, remedy in wanted:
        if is_asked and kind in picture.missing_kinds:
            return f"the cluster does not serve {kind.plural}.{kind.group}, or the operator may not read them; {remedy}"
    return None
