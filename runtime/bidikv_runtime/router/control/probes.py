"""Asks engines whose breaker is open for their health, so that no client's request has to find out."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.http.fetch import fetch
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import UpstreamError
from bidikv_runtime.router.limits import Limits

logger = logging.getLogger(__name__)

HEALTH_PATH: Final = "/health"
"""vLLM answers 200, or 503 once its engine core is dead."""
_LOOK_SECONDS: Final = 0.25
"""Between two looks whether a probe is due."""
_MOST_BYTES: Final = 64 * 1024


class Prober:
    """Sends the probes that the fleet's breakers ask for."""

    def __init__(self, fleet: Fleet, pool: UpstreamPool, limits: Limits) -> None:
        self._fleet, self._pool, self._limits = fleet, pool, limits

    async def run(self) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for endpoint in self._fleet.due_probes():
                    tasks.create_task(self._probe(endpoint))
                await asyncio.sleep(_LOOK_SECONDS)

    async def _probe(self, endpoint: Endpoint) -> None:
        try:
            answer = await fetch(
                self._pool, endpoint, HEALTH_PATH, seconds=self._limits.probe_seconds, limit=_MOST_BYTES
            )
        except UpstreamError as error:
            logger.info("The engine %s is still away: %s", endpoint.address, error)
            self._fleet.note_failure(endpoint, "probe")
            return
        if answer.status == 200:
            logger.info("The engine %s is back", endpoint.address)
            self._fleet.note_success(endpoint)
        else:
            logger.info("The engine %s is still unwell: HTTP %d", endpoint.address, answer.status)
            self._fleet.note_failure(endpoint, "probe")
