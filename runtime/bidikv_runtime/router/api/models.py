"""The models of several engines as one list; pure.

Why: an adapter may be loaded on some engines only, and one engine that is down must not make the list fail.

Invariant: ids and their order do not depend on the order of the answers. Entries of one id differ between engines (time
of creation, ids of permissions): the first answer's counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class _Model(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


_LIST = msgspec.json.Decoder(_List)
_MODEL = msgspec.json.Decoder(_Model)
Models = dict[str, msgspec.Raw]
"""Id -> the engine's entry, as it was sent; in the order of ids."""


def merge_models(answers: Iterable[bytes]) -> Models | None:
    """The union of engines' answers to ``GET /v1/models``, by id.

    Returns:
        None when none of ``answers`` can be read.
    """
    found: Models = {}
    readable = False
    for answer in answers:
        try:
            entries = {_MODEL.decode(entry).id: entry for entry in _LIST.decode(answer).data}
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        readable = True
        found = entries | found
    return dict(sorted(found.items())) if readable else None


def build_list(models: Models) -> bytes:
    """The body of ``GET /v1/models``."""
    return msgspec.json.encode({"object": "list", "data": list(models.values())})
