"""Everything one reconcile looks at, read into one frozen value.

Usually from the cache that the watches fill. Now and then from the API server itself: a watch that silently lost an
event is then corrected, and a difference is counted.
"""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import CHILD_KINDS, INFERENCE, POD
from bidikv_operator.kube import Kube, NotFoundError
from bidikv_operator.state import Observed


def observe_cached(cache: ObjectCache, key: Key) -> Observed | None:
    """None when the resource does not exist."""
    resource = cache.resource(key)
    if resource is None:
        return None
    return Observed(resource=resource, children=cache.children(key), pods=cache.pods(key))


async def observe_live(kube: Kube, cache: ObjectCache, key: Key) -> int:
    """Correct the cache of one resource by reading the API server. Returns how many objects differed.

    Raises:
        ApiError: a list failed; what was corrected before stays corrected.
    """
    try:
        resource = await kube.get(INFERENCE, key.namespace, key.name)
    except NotFoundError:
        cached = cache.resource(key)
        if cached is None:
            return 0
        cache.drop(INFERENCE, cached)
        return 1
    cached = cache.resource(key)
    cache.put(INFERENCE, resource)
    differing = int(cached is None or cached["metadata"]["resourceVersion"] != resource["metadata"]["resourceVersion"])
    selector = f"{names.LABEL_OWNER}={key.name}"
    for kind in (*CHILD_KINDS, POD):
        listed = await kube.list(kind, key.namespace, label_selector=selector)
        differing += cache.correct(kind, key, listed.items, listed.resource_version)
    return differing
