"""The corrections to the NIXL agent reach its configuration, and the binding is put back."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from bidikv_runtime.connector.agent import QuietAgent, agent_settings


class Config:
    """As NIXL's: attributes that are descriptors of a base class."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    @property
    def pthrDelay(self) -> int:
        return int(self._values["delay"])

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:
        self._values["delay"] = value

    @property
    def syncMode(self) -> str:
        return str(self._values["mode"])

    @syncMode.setter
    def syncMode(self, value: str) -> None:
        self._values["mode"] = value


@pytest.fixture
def agent_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    bindings: Any = ModuleType("bindings")
    bindings.nixlAgentConfig, bindings.NIXL_THREAD_SYNC_STRICT, bindings.other = Config, "strict", "kept"
    module: Any = ModuleType("fake_nixl_api")
    module.nixlBind = bindings
    monkeypatch.setitem(sys.modules, "fake_nixl_api", module)

    class Agent:
        def __init__(self) -> None:
            self.config = module.nixlBind.nixlAgentConfig()
            self.config.pthrDelay = 0
            self.config.syncMode = "none"
            self.other = module.nixlBind.other

    Agent.__module__ = "fake_nixl_api"
    return Agent


def test_agents_built_inside_get_the_settings(agent_class: Any) -> None:
    with agent_settings(agent_class, 5000):
        agent = agent_class()
    assert (agent.config.pthrDelay, agent.config.syncMode, agent.other) == (5000, "strict", "kept")


def test_the_binding_is_put_back_after_a_failure(agent_class: Any) -> None:
    with pytest.raises(RuntimeError, match="no backend"), agent_settings(agent_class, 5000):
        raise RuntimeError("no backend")
    agent = agent_class()
    assert (agent.config.pthrDelay, agent.config.syncMode) == (0, "none")


def test_transfers_carry_no_notification() -> None:
    class Agent:
        def make_prepped_xfer(self, *arguments: Any, notif_msg: bytes = b"", **options: Any) -> Any:
            return arguments, notif_msg, options

        def send_notif(self, *arguments: Any, **options: Any) -> None:
            raise AssertionError("a notification was sent")

        def transfer(self, handle: int) -> int:
            return handle

    agent = QuietAgent(Agent())
    assert agent.make_prepped_xfer("READ", 1, notif_msg=b"done", backends=["UCX"]) == (
        ("READ", 1),
        b"",
        {"backends": ["UCX"]},
    )
    agent.send_notif("peer", notif_msg=b"done")
    assert agent.transfer(7) == 7
