"""Async tests of the runtime run on uvloop, the router's event loop in production."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Hook of pytest-asyncio."""
    return {"uvloop": uvloop.new_event_loop}
