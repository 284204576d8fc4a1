"""Whom the engines cannot reach, by the majority of those that tried. Pure.

One engine that reaches nobody is alone with its opinion; one that nobody reaches is outvoted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from bidikv_operator.state import EngineFacts

STALE_SECONDS: Final = 90.0
"""An older report says nothing about now: several polls have failed since."""
GRACE_SECONDS: Final = 60.0
"""An engine that was first asked less long ago may still be busy with its start."""


def is_pending(facts: EngineFacts) -> bool:
    """Whether it is too early to say anything about the engine: after a change of leader, of each."""
    return facts.report is None and facts.age_seconds < GRACE_SECONDS


def is_fresh(facts: EngineFacts) -> bool:
    """Whether the engine's report still counts."""
    return facts.report is not None and facts.age_seconds < STALE_SECONDS


def find_unreachable(engines: Iterable[EngineFacts]) -> frozenset[str]:
    """Addresses that most of the peers which tried lately could not reach. A pod's ranks do not vote on each other."""
    engines = tuple(engines)
    votes = Counter[str]()
    uid_of = {engine.address: engine.uid for engine in engines}
    accused = set[str]()
    for voter in engines:
        if not is_fresh(voter) or voter.report is None:
            continue
        for addresses, weight in ((voter.report.unreachable, 1), (voter.report.reached, -1)):
            for address in addresses:
                if uid_of.get(address, voter.uid) != voter.uid:
                    votes[address] += weight
        accused.update(voter.report.unreachable)
    return frozenset(address for address in accused if votes[address] > 0)
