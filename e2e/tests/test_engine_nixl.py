"""Sorted descriptors on real NIXL: it joins what lies side by side, and every byte arrives where it belongs."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from e2e.engine.local import ENVIRONMENT, ROOT
from e2e.engine.nixl_loopback import REGIONS, SLOTS
from e2e.engine.provision import ENGINE_LINK

pytestmark = pytest.mark.engine
LIMIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What the reading agent reports of each case."""
    done = subprocess.run(
        [str(ENGINE_LINK / "bin" / "python"), "-m", "e2e.engine.nixl_loopback"],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def test_every_byte_is_where_it_belongs_and_nothing_else_is_written(results: dict[str, dict[str, Any]]) -> None:
    assert len(results) > 20
    assert {case for case, result in results.items() if not result["right"]} == set()


@pytest.mark.parametrize("case", ["ascending", "descending"])
def test_slots_side_by_side_become_one_piece_per_region(results: dict[str, dict[str, Any]], case: str) -> None:
    """Not one piece in all: the regions lie next to each other, too, but each is registered for itself."""
    assert results[case]["pairs"] == REGIONS * SLOTS
    assert results[case]["pieces"] == REGIONS


def test_what_is_not_side_by_side_at_both_ends_is_not_joined(results: dict[str, dict[str, Any]]) -> None:
    for case in ("ascending from descending", "half of each slot"):
        assert results[case]["pieces"] == results[case]["pairs"] == REGIONS * SLOTS
