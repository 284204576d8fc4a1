"""Identities: engines get one without any right or token, the router one that may read its EndpointSlices."""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, engine_account_name, role_name
from bidikv_operator.kinds import SERVICE_ACCOUNT
from bidikv_operator.resolved import Resolved


def build_engine_account(resolved: Resolved) -> Manifest:
    account = build_object(SERVICE_ACCOUNT, resolved, engine_account_name(resolved))
    account["automountServiceAccountToken"] = False
    return account


def build_router_account(resolved: Resolved) -> Manifest:
    return build_object(SERVICE_ACCOUNT, resolved, role_name(resolved, names.ROUTER), names.ROUTER)
