"""Compare the cache with the API server itself: once before the first reconcile, then now and then.

The first time makes the cache complete: watches are open by then, so what changes after the list arrives as an event.
Later times repair what a watch silently lost; that they find anything is worth a warning.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Protocol

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import INFERENCE, WATCHED_KINDS, Kind
from bidikv_operator.kube import Listed

logger = logging.getLogger(__name__)


class ListClient(Protocol):
    def pages(self, kind: Kind, namespace: str | None, *, label_selector: str = "") -> AsyncIterator[Listed]: ...


@dataclass(frozen=True)
class Corrections:
    """What a comparison found."""

    count: int
    """Objects that differed."""
    keys: frozenset[Key]
    """The resources that they belong to, among them ones that are gone."""


async def resync(
    client: ListClient, cache: ObjectCache, namespaces: Collection[str], kinds: Collection[Kind] = WATCHED_KINDS
) -> Corrections:
    """List everything that is watched and correct the cache.

    Args:
        namespaces: those that are served; empty means all.
        kinds: what is watched.

    Raises:
        ApiError: a list failed; what was corrected before stays corrected.
    """
    count, keys = 0, set[Key]()
    for namespace in namespaces or (None,):
        for kind in kinds:
            selector = "" if kind == INFERENCE else names.LABEL_OWNER
            correction, version = cache.correct(kind, namespace), ""
            async for page in client.pages(kind, namespace, label_selector=selector):
                correction.add(page.items)
                version = version or page.resource_version
            found, concerned = correction.finish(version)
            count += found
            keys |= concerned
    return Corrections(count, frozenset(keys))
