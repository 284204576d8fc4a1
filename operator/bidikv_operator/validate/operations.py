"""``spec.monitoring``, ``updateStrategy``, ``security`` and ``healing``."""

from __future__ import annotations

from bidikv_operator import resolved
from bidikv_operator.api.operations import Healing, MetricsFrom, Monitoring, PeerToken, Security, UpdateStrategy
from bidikv_operator.validate.labels import check_label_keys, check_owned_keys
from bidikv_operator.validate.problem import Problem, Problems


def _first(value: int | None, default: int) -> int:
    return default if value is None else value


def resolve_monitoring(given: Monitoring) -> tuple[resolved.ResolvedMonitoring, Problems]:
    labels = given.labels or {}
    monitoring = resolved.ResolvedMonitoring(
        pod_monitor=given.pod_monitor == "Enabled",
        interval_seconds=_first(given.interval_seconds, 30),
        labels=labels,
    )
    field = "spec.monitoring.labels"
    return monitoring, check_label_keys(field, labels) + check_owned_keys(field, labels)


def resolve_updates(given: UpdateStrategy) -> tuple[resolved.ResolvedUpdates, Problems]:
    surge = 0 if given.max_surge is None else given.max_surge
    unavailable = 1 if given.max_unavailable is None else given.max_unavailable
    problems = []
    if surge in (0, "0%") and unavailable in (0, "0%"):
        problems.append(
            Problem(
                "spec.updateStrategy.maxUnavailable",
                "is 0 as maxSurge is, so that no pod could ever be replaced; raise one of them",
            )
        )
    updates = resolved.ResolvedUpdates(
        max_surge=surge,
        max_unavailable=unavailable,
        progress_deadline_seconds=_first(given.progress_deadline_seconds, 4200),
        drain_seconds=_first(given.drain_seconds, 120),
    )
    return updates, problems


def resolve_security(given: Security) -> tuple[resolved.ResolvedSecurity, Problems]:
    token = given.peer_token or PeerToken()
    labels = _labels_of(given.metrics_from)
    security = resolved.ResolvedSecurity(
        network_policy=given.network_policy != "Disabled",
        metrics_namespace_labels=labels,
        restricted=given.pod_security != "Unrestricted",
        token_rotation_days=_first(token.rotation_days, 0),
        token_rotation=token.rotation or "",
    )
    return security, check_label_keys("spec.security.metricsFrom.namespaceLabels", labels)


def _labels_of(given: MetricsFrom | None) -> dict[str, str]:
    return {} if given is None else given.namespace_labels


def resolve_healing(given: Healing) -> resolved.ResolvedHealing:
    return resolved.ResolvedHealing(
        enabled=given.mode != "Disabled",
        per_hour=_first(given.maximum_per_hour, 4),
        unreachable_seconds=_first(given.unreachable_seconds, 60),
    )
