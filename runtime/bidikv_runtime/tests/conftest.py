"""What holds for all tests of the runtime.

Async tests run on uvloop, the router's event loop in production. Property tests have no deadline: on a busy machine a
slow example is no failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Hook of pytest-asyncio."""
    return {"uvloop": uvloop.new_event_loop}
