"""Everything one reconcile looks at, taken from the cache into one frozen value."""

from __future__ import annotations

from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import Kind
from bidikv_operator.state import Observed


def observe(cache: ObjectCache, key: Key, missing_kinds: frozenset[Kind] = frozenset()) -> Observed | None:
    """None when the resource does not exist."""
    resource = cache.resource(key)
    if resource is None:
        return None
    return Observed(resource=resource, children=cache.children(key), pods=cache.pods(key), missing_kinds=missing_kinds)
