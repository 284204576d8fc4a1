"""Metadata of children: names, labels, selectors, owner. Built from scratch, nothing is copied from the resource.

Copied labels or annotations (Argo CD's tracking among them) would make GitOps tools take children for their own
objects. ``app.kubernetes.io/instance`` is left out for the same reason.
"""

from __future__ import annotations

from typing import Any

from bidikv_operator import names
from bidikv_operator.kinds import Kind
from bidikv_operator.resolved import Resolved

Manifest = dict[str, Any]
"""One object in the form of the API: plain dicts, lists and scalars, never None."""


def build_owner_reference(resolved: Resolved) -> Manifest:
    """The controller reference by which the garbage collector removes children after their resource."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": resolved.name,
        "uid": resolved.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def build_selector(resolved: Resolved, role: names.Role) -> dict[str, str]:
    """Labels by which Services, Deployments and budgets find the pods of a role. Immutable in a Deployment."""
    return {names.LABEL_OWNER: resolved.name, names.LABEL_ROLE: role}


def build_labels(resolved: Resolved, role: names.Role | None = None) -> dict[str, str]:
    labels = {
        names.LABEL_NAME: "bidikv",
        names.LABEL_PART_OF: "bidikv",
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_OWNER: resolved.name,
    }
    if role is not None:
        labels |= {names.LABEL_COMPONENT: role, names.LABEL_ROLE: role}
    return labels


def build_object(kind: Kind, resolved: Resolved, name: str, role: names.Role | None = None) -> Manifest:
    """The head of a child; the caller adds ``spec``, ``data`` or ``rules``."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": name,
            "namespace": resolved.namespace,
            "labels": build_labels(resolved, role),
            "ownerReferences": [build_owner_reference(resolved)],
        },
    }


def role_name(resolved: Resolved, role: names.Role) -> str:
    """Name of the children that belong to one role: Deployment, budget, ServiceAccount, headless Service."""
    return names.child_name(resolved.name, role)


def engine_account_name(resolved: Resolved) -> str:
    return names.child_name(resolved.name, "engine")


def token_secret_name(resolved: Resolved) -> str:
    """Secret with the tokens by which engines and routers know each other (``peer_token.py`` writes it)."""
    return names.child_name(resolved.name, names.TOKEN_SECRET)


def compute_replicas(resolved: Resolved, role: names.Role) -> int:
    return {
        "prefill": resolved.prefill.replicas,
        "decode": resolved.decode.replicas,
        "router": resolved.router.replicas,
    }[role]
