"""``status.kvReuse``: what users see of the reuse of KV, so coarse that it seldom changes. Pure.

Both numbers have a dead band around what the status says already: a value that wavers is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.engines.reach import is_fresh, is_pending
from bidikv_operator.state import EngineFacts

SESSIONS: Final = "sessions"
PERCENT: Final = "reusedTokensPercent"
STEP_PERCENT: Final = 10
LEAST_TOKENS: Final = 10_000
"""Of prompts, before a share of them says anything."""


def compute_reuse(engines: Iterable[EngineFacts], previous: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Sessions whose KV decode engines hold, and the share of prefill's prompt tokens whose KV was read from others.

    Args:
        engines: those that run.
        previous: what the live status says; it stays until all have been asked.
    """
    engines, known = tuple(engines), previous or {}
    reports = {one.address: one.report for one in engines if is_fresh(one) and one.report is not None}
    if any(map(is_pending, engines)):
        return dict(previous) if previous else None
    if not reports:
        return None
    by_role = {
        role: [reports[one.address] for one in engines if one.role == role and one.address in reports]
        for role in names.ENGINE_ROLES
    }
    held = sum(report.held_sessions for report in by_role[names.DECODE])
    facts = {SESSIONS: _settle_count(held, known.get(SESSIONS))}
    prompts = sum(report.prompt_tokens for report in by_role[names.PREFILL])
    if prompts >= LEAST_TOKENS:
        share = 100 * sum(report.reused_tokens for report in by_role[names.PREFILL]) / prompts
        facts[PERCENT] = _settle_percent(share, known.get(PERCENT))
    return facts


def _settle_count(count: int, known: int | None) -> int:
    """The known number while the count is within a factor of two of it, else the power of two below the count."""
    if known is not None and (count == known or 0 < known / 2 < count < known * 2):
        return known
    return 1 << (count.bit_length() - 1) if count else 0


def _settle_percent(share: float, known: int | None) -> int:
    """The known number while the share is less than a step away, else the nearest multiple of the step."""
    if known is not None and abs(share - known) < STEP_PERCENT:
        return known
    return min(100, STEP_PERCENT * round(share / STEP_PERCENT))
