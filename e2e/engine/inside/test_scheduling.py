"""Nothing that vLLM's scheduler can do makes an engine publish, or a reader accept, KV that is not what its hash says.

``MUTANTS`` take one rule of the protocol away each; the same scenarios then have to fail. They show that the rule is
needed and that the scenarios would notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from bidikv_runtime.connector import publisher
from bidikv_runtime.connector.index import PublicationIndex, compute_final_tokens
from bidikv_runtime.connector.scheduler import VerifiedReadScheduler
from bidikv_runtime.connector.weights import StaleBlocks
from e2e.engine.inside.scenario import Scenario

SCENARIOS = 60
ACTIONS = 150
MUTANT_SCENARIOS = 600
"""At most: a mutant's test ends with the first scenario that fails."""

CONFIGURATIONS = [
    pytest.param({"asynchronous": False}, id="sync"),
    pytest.param({"asynchronous": True}, id="async"),
    pytest.param({"asynchronous": False, "drafts": True}, id="sync, drafts"),
    pytest.param({"asynchronous": True, "drafts": True}, id="async, drafts"),
    pytest.param({"asynchronous": False, "policy": "priority"}, id="sync, priority"),
    pytest.param({"asynchronous": True, "policy": "priority", "blocks": 18, "budget": 24}, id="async, priority, tight"),
    pytest.param({"asynchronous": False, "weights_change": True}, id="sync, weights"),
    pytest.param({"asynchronous": True, "drafts": True, "weights_change": True}, id="async, drafts, weights"),
]


def run(scenario: Scenario, seeds: range) -> None:
    for seed in seeds:
        try:
            scenario.run(random.Random(seed), ACTIONS)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_what_is_published_and_accepted_is_right(configuration: dict[str, Any]) -> None:
    scenario = Scenario(**configuration)
    try:
        run(scenario, range(SCENARIOS))
    finally:
        scenario.stop()
    for engine in scenario.pair:
        assert engine.accepted > SCENARIOS / 2, "the scenarios hardly read anything"
        assert engine.rejected > 0, "no read was ever overtaken"


def count_steps_under_way(found: int, computed: int, in_flight: int, total: int) -> int:
    return compute_final_tokens(found, computed, 0, total)


def trust_the_local_cache(found: int, computed: int, in_flight: int, total: int) -> int:
    return compute_final_tokens(-1, computed, in_flight, total)


def keep_published(self: Any, block: Any) -> None:
    pass


def confirm_all(self: Any, blocks: Any, numbers: Any) -> int:
    return len(blocks)


def use_numbers_again(self: Any, hashes: Any, blocks: Any) -> list[int]:
    self._next_number = 1
    return PUBLISH(self, hashes, blocks)


def publish_unread(self: Any, request: Any, block_ids: Any) -> Any:
    self._loading.pop(request.request_id, None)
    return REQUEST_FINISHED(self, request, block_ids)


def drop_unfinished_only(self: Any, pool: Any, unfinished: Any) -> None:
    self._requests.update(unfinished)


def admit_anything(self: Any, request_id: str, found: Any, fresh: Any) -> None:
    self.grow(request_id, fresh)


def keep_what_stale_requests_cached(self: Any, pool: Any, request_id: str, blocks: Any) -> None:
    self._requests.discard(request_id)
    if not self._requests:
        self._blocks = set()


def ignore_names(self: Any, name: str) -> None:
    pass


PUBLISH = PublicationIndex.publish
REQUEST_FINISHED = VerifiedReadScheduler.request_finished
NEW_WEIGHTS = {"weights_change": True}
MUTANTS = [
    pytest.param(publisher, "compute_final_tokens", count_steps_under_way, {}, id="count steps under way"),
    pytest.param(publisher, "compute_final_tokens", trust_the_local_cache, {}, id="trust the local cache"),
    pytest.param(publisher.Publisher, "_on_reuse", keep_published, {}, id="no un-publish"),
    pytest.param(PublicationIndex, "validate", confirm_all, {}, id="no validation"),
    pytest.param(PublicationIndex, "publish", use_numbers_again, {}, id="numbers used again"),
    pytest.param(VerifiedReadScheduler, "request_finished", publish_unread, {}, id="publish what was not read yet"),
    pytest.param(StaleBlocks, "change", drop_unfinished_only, NEW_WEIGHTS, id="trust blocks of earlier weights"),
    pytest.param(StaleBlocks, "admit", admit_anything, NEW_WEIGHTS, id="build on blocks of earlier weights"),
    pytest.param(StaleBlocks, "end", keep_what_stale_requests_cached, NEW_WEIGHTS, id="leave them in the prefix cache"),
    pytest.param(VerifiedReadScheduler, "weights_named", ignore_names, NEW_WEIGHTS, id="share between any weights"),
]


@pytest.mark.parametrize(("owner", "name", "mutant", "options"), MUTANTS)
def test_every_rule_is_needed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Callable[..., Any], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    scenario = Scenario(asynchronous=False, **options)
    try:
        with pytest.raises(AssertionError, match=r"foreign KV|written to|-\d+$"):
            run(scenario, range(MUTANT_SCENARIOS))
    finally:
        scenario.stop()
