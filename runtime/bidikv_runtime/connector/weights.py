"""Weights that change under a running engine, and the KV that then no longer belongs to its hash.

A block hash says nothing of weights, and vLLM tells its connectors nothing of their change: workers are reached by
``EngineCore.collective_rpc`` (``update_weights``, ``reload_weights``, any function of a trainer) and the scheduler only
by ``reset_prefix_cache``, which is the caller's choice and refuses while blocks are in use. So the engine core's class
is watched (``watch_weights``), every call to the workers that is not known to leave the weights alone counts as a
change, and ``StaleBlocks`` follows the KV of earlier weights until none of it can be found any more.

Engines share KV again after a change once the new weights have a name, which vLLM calls the weight version. The names
are the trainer's: equal ones must mean equal weights.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

HARMLESS_CALLS: Final = frozenset(
    {
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
    }
)
"""Worker methods that change no weights. A function object is never taken for harmless."""
WEIGHTS_ARE_LOST: Final = 2
"""From this level of sleep on the weights are discarded; at level 1 they come back as they were."""
_WATCHERS: Final = "_bidikv_weight_watchers"


def draw_unnamed() -> str:
    """A name for weights that nobody has named: no other engine has it."""
    return f"unnamed-{secrets.token_hex(8)}"


def watch_weights(core: Any, on_change: Callable[[], None], on_name: Callable[[str], None]) -> Callable[[], None]:
    """Call ``on_change`` after each call that may have changed weights, even one that failed, and ``on_name`` when they
    are given a name (their version). Both run in the thread of the engine core, which is the scheduler's.

    Args:
        core: vLLM's class ``EngineCore``; its methods are wrapped once for all watchers.
        on_change: the weights may be others now.
        on_name: they have this name from now on.

    Returns:
        A function that ends the watch.
    """
    watchers: list[tuple[Callable[[], None], Callable[[str], None]]] | None = vars(core).get(_WATCHERS)
    if watchers is None:
        watchers = []
        setattr(core, _WATCHERS, watchers)
        _wrap(core, watchers)
    watcher = (on_change, on_name)
    watchers.append(watcher)

    def end() -> None:
        if watcher in watchers:
            watchers.remove(watcher)

    return end


def _wrap(core: Any, watchers: Sequence[tuple[Callable[[], None], Callable[[str], None]]]) -> None:
    call, name, fall_asleep = core.collective_rpc, core.set_weight_version, core.sleep

    def changed() -> None:
        for on_change, _ in list(watchers):
            on_change()

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(self, method, *arguments, **options)
        finally:
            if not (isinstance(method, str) and method in HARMLESS_CALLS):
                changed()

    @functools.wraps(name)
    def set_weight_version(self: Any, weight_version: str) -> None:
        name(self, weight_version)
        for _, on_name in list(watchers):
            on_name(weight_version)

    @functools.wraps(fall_asleep)
    def sleep(self: Any, level: int = 1, *arguments: Any, **options: Any) -> Any:
        try:
            return fall_asleep(self, level, *arguments, **options)
        finally:
            if level >= WEIGHTS_ARE_LOST:
                changed()

    core.collective_rpc, core.set_weight_version, core.sleep = collective_rpc, set_weight_version, sleep


class StaleBlocks:
    """Blocks that may hold KV of earlier weights, and the unfinished requests that build on such KV.

    A request is stale when it was under way at a change, or was admitted with a stale block as part of its prefix; all
    its blocks are stale, too. vLLM puts blocks of unfinished requests into its prefix cache at any time, so what counts
    is the block. The set empties with the end of the last stale request: what the prefix cache then still has of it is
    evicted.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __bool__(self) -> bool:
        """Whether there are any: if not, nothing need be followed."""
        return bool(self._blocks)

    def change(self, pool: Any, unfinished: Sequence[str]) -> None:
        """The weights may have changed: all KV is of earlier ones, and must not be found by new requests.

        Args:
            pool: vLLM's ``BlockPool``.
            unfinished: requests that have begun.
        """
        self._requests.update(unfinished)
        everything = set(range(len(pool.blocks)))
        pool.evict_blocks(everything)
        self._blocks = everything if self._requests else set()

    def admit(self, request_id: str, found: Sequence[int], fresh: Sequence[int]) -> None:
        """A request begins on blocks ``found`` in the prefix cache; the ``fresh`` ones were allocated for it."""
        if not self._blocks:
            return
        if not self._blocks.isdisjoint(found):
            self._requests.add(request_id)
        self.grow(request_id, fresh)

    def grow(self, request_id: str, fresh: Sequence[int]) -> None:
        """More blocks were allocated for a request under way."""
        if not self._blocks:
            return
        if request_id in self._requests:
            self._blocks.update(fresh)
        else:
            self._blocks.difference_update(fresh)

    def end(self, pool: Any, request_id: str, blocks: Sequence[int]) -> None:
        """A request ends. What a stale one computed is found no more."""
        if request_id not in self._requests:
            return
        self._requests.discard(request_id)
        if self._requests:
            pool.evict_blocks(self._blocks.intersection(blocks))
        else:
            pool.evict_blocks(self._blocks)
            self._blocks = set()
