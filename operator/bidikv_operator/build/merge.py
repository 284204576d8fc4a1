"""How a ``podTemplate`` merges into a pod template. Pure.

The rules follow those of ``kubectl patch --type strategic`` for the fields that they name. From the override's top:

- objects merge key by key; a null removes the key;
- ``containers`` and ``initContainers`` merge by ``name``: an item of a known name merges into it, a new one is
  appended;
- ``volumes``, ``env`` and ``ports`` merge by ``name`` and ``volumeMounts`` by ``mountPath``, but an item of a known
  name replaces the whole item: half of one volume source and half of another is no volume;
- everything else (other lists, scalars) replaces. So ``tolerations: []`` leaves none, and a list that should grow has
  to be given whole; ``scheduling`` in the resource adds to the operator's instead.

Unlike there, no item of a named list can be removed (``$patch: delete``), and ports merge by name, not by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MERGE_INTO: Final = {"containers": "name", "initContainers": "name"}
MERGE_WHOLE: Final = {"volumes": "name", "env": "name", "ports": "name", "volumeMounts": "mountPath"}


def merge_override(base: Any, override: Any, field: str = "") -> Any:
    """``override`` merged into ``base`` by the rules above; neither argument is changed."""
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        merged = dict(base)
        for key, value in override.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge_override(base.get(key), value, key)
        return merged
    if isinstance(override, Mapping):
        return merge_override({}, override, field)
    key_of_item = MERGE_INTO.get(field) or MERGE_WHOLE.get(field)
    if key_of_item is not None and isinstance(override, list) and _are_named(override, key_of_item):
        return _merge_named(base if isinstance(base, list) else [], override, key_of_item, into=field in MERGE_INTO)
    return override


def _are_named(items: list[Any], key: str) -> bool:
    return all(isinstance(item, Mapping) and key in item for item in items)


def _merge_named(base: list[Any], override: list[Any], key: str, *, into: bool) -> list[Any]:
    known = {item[key] for item in base}
    changed = {item[key]: item for item in override}
    merged = [
        item if item[key] not in changed else merge_override(item if into else {}, changed[item[key]]) for item in base
    ]
    return merged + [merge_override({}, item) for name, item in changed.items() if name not in known]
