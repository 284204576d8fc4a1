"""Which engine a scale-down should keep."""

from __future__ import annotations

from bidikv_operator.engines.value import MAXIMUM, compute_session_value
from bidikv_operator.tests.engine_samples import make_report


def test_what_only_this_engine_has_outweighs_what_it_holds() -> None:
    nothing = compute_session_value([make_report()])
    held = compute_session_value([make_report(held_sessions=4096)])
    handover = compute_session_value([make_report(unread_handovers=1)])
    unread = compute_session_value([make_report(unread_sessions=1, held_sessions=1)])
    two_ranks = compute_session_value([make_report(unread_sessions=1), make_report(unread_sessions=1)])
    assert 0 == compute_session_value([]) == nothing < held < handover < unread < two_ranks


def test_it_fits_the_annotation() -> None:
    assert compute_session_value([make_report(unread_sessions=10**9, held_sessions=10**9)]) == MAXIMUM == 2**31 - 1
