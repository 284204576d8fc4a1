"""``/v1/models``: what the engines serve, asked from all of them.

Why not from one: an engine that is down, or that lacks an adapter, must not decide what clients see. The list is kept
for ``KEPT_SECONDS``, per tenant, since engines may judge a client's key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from time import monotonic
from typing import Final

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.models import Models, merge_models
from bidikv_runtime.router.api.tenant import CREDENTIALS, compute_tenant
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.http.fetch import Answer, fetch
from bidikv_runtime.router.http.http1 import RequestHead
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import UpstreamError

KEPT_SECONDS: Final = 2.0
ASK_SECONDS: Final = 5.0
_LIST_BYTES: Final = 4 * 1024 * 1024
_MOST_TENANTS: Final = 256
_OK: Final = 200


class ModelList:
    """Asks, merges and keeps."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._kept: OrderedDict[bytes, tuple[float, Models]] = OrderedDict()

    async def get(self, head: RequestHead, engines: Sequence[Endpoint]) -> Models:
        """The models that a client sees.

        Args:
            head: of its request.
            engines: to ask.

        Raises:
            ApiError: no engine gave a list; an engine's refusal of the client keeps its status.
        """
        credentials = [(name, value) for name in CREDENTIALS if (value := head.fields.get(name)) is not None]
        tenant = compute_tenant(b"\0".join(value for _, value in credentials))
        kept = self._kept.get(tenant)
        if kept is not None and kept[0] > monotonic():
            return kept[1]
        if not engines:
            raise ApiError(503, "No engine is ready; retry later.", retry_after=1)
        headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in credentials]
        answers = [a for a in await asyncio.gather(*(self._ask(e, headers) for e in engines)) if a is not None]
        models = merge_models(answer.body for answer in answers if answer.status == _OK)
        if models is None:
            refusals = [answer.status for answer in answers if 400 <= answer.status < 500]
            if refusals:
                raise ApiError(refusals[0], f"The engines answered with status {refusals[0]}.")
            raise ApiError(502, "No engine gave a list of its models; retry later.", retry_after=1)
        self._kept[tenant] = monotonic() + KEPT_SECONDS, models
        self._kept.move_to_end(tenant)
        if len(self._kept) > _MOST_TENANTS:
            self._kept.popitem(last=False)
        return models

    async def _ask(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]]) -> Answer | None:
        try:
            return await fetch(
                self._pool, endpoint, "/v1/models", seconds=ASK_SECONDS, limit=_LIST_BYTES, headers=headers
            )
        except UpstreamError:
            return None
