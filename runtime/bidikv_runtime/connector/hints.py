"""What a request says about its place in a session: the keys of ``kv_transfer_params`` besides its sources.

They come from the router over the API, so they may be anything: a value of the wrong type or out of bounds counts as
absent. They steer speed (what is held, what is refused rather than recomputed), never what is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_runtime import contract

MAXIMUM_COUNT: Final = 2**53
"""Larger numbers of tokens or bytes make no sense, and not every JSON reader takes them."""


@dataclass(frozen=True)
class Hints:
    session: str | None = None
    expect: str | None = None
    """``contract.EXPECT_RETURN``, ``contract.EXPECT_OVER`` or None."""
    handover: bool = False
    """A prefill leg: a decode engine reads the result at once."""
    prefilled_tokens: int = 0
    """A decode leg: tokens of the prompt that prefill reported to have computed; 0 when unknown."""
    compute_limit: int | None = None
    """A decode leg without a prefill leg: it computes at most so many tokens of the prompt."""
    body_bytes: int = 0
    """Of the client's request; 0 when unknown."""

    @property
    def direction(self) -> str:
        """Which way KV flows to this request, as a metric's label. A session's request that is no prefill leg is a
        decode leg, also the one that is repeated without ``prefilled_tokens`` after a lost hand-over."""
        if self.handover:
            return contract.DIRECTION_FROM_DECODE
        decode = self.prefilled_tokens or self.session is not None
        return contract.DIRECTION_FROM_PREFILL if decode else contract.DIRECTION_UNKNOWN


def parse_hints(params: Any) -> Hints:
    """Hints in a request's ``kv_transfer_params``, which may be of any type."""
    if not isinstance(params, Mapping):
        return Hints()
    session, expect = params.get(contract.SESSION_PARAM), params.get(contract.EXPECT_PARAM)
    named = isinstance(session, str) and 0 < len(session) <= contract.MAXIMUM_SESSION_LENGTH
    return Hints(
        session=session if named else None,
        expect=expect if expect in (contract.EXPECT_RETURN, contract.EXPECT_OVER) else None,
        handover=params.get(contract.HANDOVER_PARAM) is True,
        prefilled_tokens=_parse_count(params.get(contract.PREFILLED_PARAM)) or 0,
        compute_limit=_parse_count(params.get(contract.COMPUTE_LIMIT_PARAM)),
        body_bytes=_parse_count(params.get(contract.BODY_BYTES_PARAM)) or 0,
    )


def _parse_count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAXIMUM_COUNT else None
