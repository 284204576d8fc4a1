"""What the legs of one request share while it is served."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.admission import Admission
from bidikv_runtime.router.api.continuation import Recorder
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.choice.budget import RetryBudget
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.engine import Work
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.choice.path import Decision
from bidikv_runtime.router.exchange import Exchanges
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.upstream import AnswerTimedOut, UpstreamError
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.metrics import RouterMetrics
from bidikv_runtime.router.observe.record import Path, TurnRecord
from bidikv_runtime.router.reply import Reply

logger = logging.getLogger(__name__)

RETRIED_STATUS: Final = frozenset({500, 502, 503, 504})
"""Of an engine's answer: another engine may do better."""
SUCCESS: Final = range(200, 300)
MOST_TRIES: Final = 3
"""Of one leg, on different engines."""
MOST_REACHED: Final = 2
"""How many of these may have received it: a request that ends engines must not end them all."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all turns use."""

    config: RouterConfig
    limits: Limits
    fleet: Fleet
    exchanges: Exchanges
    admission: Admission
    budget: RetryBudget
    metrics: RouterMetrics


@dataclass(slots=True)
class Turn:
    """One request on its way."""

    request: Request
    client: ClientConnection
    record: TurnRecord
    reply: Reply
    forwarded: bytes
    """The head that both legs send, up to its framing."""
    forced: Path | None = None
    tenant: bytes = b""
    decode: list[Endpoint] = field(default_factory=list)
    """In the order to try."""
    decision: Decision | None = None
    work: Work | None = None
    """At the decode engine that is to answer."""
    guarded: bool = False
    """The decode leg says what decode must find or may compute, and may be refused for it."""
    local_refused: bool = False
    handover_lost: bool = False
    repeated: bool = False
    """Both legs were sent again because the only decode engine failed."""
    recorder: Recorder | None = None
    """Follows a stream that may have to go on elsewhere."""


def explain_failure(role: str, endpoint: Endpoint, error: UpstreamError) -> ApiError:
    """The answer to a client when no engine gave one; ``role`` with a capital letter."""
    logger.warning("%s engine %s failed: %s", role, endpoint.address, error)
    status = 504 if isinstance(error, AnswerTimedOut) else 502
    sentence = f"The {role.lower()} engine gave no answer: {error}; send the request again."
    return ApiError(status, sentence, retry_after=1)
