"""Forty seconds of the soak on the shared engines: random turns, aborts, freezes and evictions, nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.bench.soak import Soak
from e2e.bench.soak_fleet import Fleet
from e2e.engine.fixtures import POOL_BLOCKS, Deployment
from e2e.engine.local import LocalEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]


async def test_random_turns_under_disturbances_hold(
    deployment: Deployment, engines: dict[str, LocalEngine], tmp_path: Path
) -> None:
    fleet = Fleet(engines["P"], [engines["D"]], engines["M"], POOL_BLOCKS)
    result = await Soak(fleet, seed=3, seconds=40.0, lanes=3, kills=False, folder=tmp_path).run()
    assert result["faults"] == [], result
    assert {"freeze", "evict"} <= result["tally"]["disturbances"].keys()
