"""What would be lost with an engine's pod, as one number: Kubernetes removes pods of lower cost first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bidikv_runtime.contract import EngineReport

MAXIMUM: Final = 2**31 - 1
"""The annotation ``controller.kubernetes.io/pod-deletion-cost`` is a 32-bit integer."""
HELD_LIMIT: Final = 9_999
UNREAD_WEIGHT: Final = HELD_LIMIT + 1
"""One session that only this engine holds outweighs any number that others have read as well."""


def compute_session_value(reports: Iterable[EngineReport]) -> int:
    """The value of one pod from its ranks' reports: first what no other engine has read yet, then what is held."""
    unread = held = 0
    for report in reports:
        unread += report.unread_sessions + report.unread_handovers
        held += report.held_sessions
    return min(MAXIMUM, unread * UNREAD_WEIGHT + min(held, HELD_LIMIT))
