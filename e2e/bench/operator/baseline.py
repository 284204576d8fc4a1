"""What the API server alone costs: the operator's writes, computed before, sent by a client that does nothing else.

They are taken from the API server's audit log after the operator served two samples, and written anew for every
resource, so that nothing here follows how the operator is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from e2e.bench.operator.client import Client, do_all
from e2e.bench.operator.observe import parse_call

Object = dict[str, Any]

METHODS: Final = {"create": "POST", "patch": "PATCH"}
APPLY: Final = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Write:
    method: str
    uri: str
    body: str

    @property
    def content_type(self) -> str:
        return APPLY if self.method == "PATCH" else "application/json"


def collect_writes(lines: Iterable[bytes]) -> dict[str, list[Write]]:
    """The operator's writes by namespace, in their order, from an audit log with bodies."""
    found: dict[str, list[Write]] = {}
    for line in lines:
        event = json.loads(line)
        call = parse_call(event)
        if call is None or not call.is_write or call.verb not in METHODS or call.status >= 300:
            continue
        write = Write(METHODS[call.verb], event["requestURI"], json.dumps(event["requestObject"]))
        found.setdefault(event["objectRef"]["namespace"], []).append(write)
    return found


def retarget(writes: Iterable[Write], sample: Object, resource: Object) -> list[Write]:
    """The same writes for another resource of the same spec. Name, namespace and uid occur nowhere by chance."""
    replacements = [(sample[field], resource[field]) for field in ("uid", "name", "namespace")]

    def replace(text: str) -> str:
        for old, new in replacements:
            text = text.replace(old, new)
        return text

    return [Write(write.method, replace(write.uri), replace(write.body)) for write in writes]


async def send_writes(client: Client, writes: Sequence[Sequence[Write]]) -> float:
    """Send the writes of many resources, those of one resource in their order. Returns seconds."""

    async def send(group: Sequence[Write]) -> None:
        for write in group:
            await client.call(write.method, write.uri, write.body.encode(), write.content_type)

    began = time.monotonic()
    await do_all(send, writes)
    return time.monotonic() - began
