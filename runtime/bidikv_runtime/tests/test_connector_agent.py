"""The corrections to the NIXL agent reach its configuration, and the binding is put back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bidikv_runtime.connector import agent as agent_module
from bidikv_runtime.connector.agent import ReadingAgent, agent_settings, explain_missing_backend


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

    class InnerAgent:
        def createBackend(self, backend: str, parameters: dict[str, str]) -> tuple[str, dict[str, str]]:
            return backend, parameters

    bindings.nixlAgent = InnerAgent
    module: Any = ModuleType("fake_nixl_api")
    module.nixlBind = bindings
    monkeypatch.setitem(sys.modules, "fake_nixl_api", module)

    class Agent:
        def __init__(self) -> None:
            self.config = module.nixlBind.nixlAgentConfig()
            self.config.pthrDelay = 0
            self.config.syncMode = "none"
            self.other = module.nixlBind.other
            self.inner = module.nixlBind.nixlAgent()

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


@pytest.fixture
def plugins(agent_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of NIXL whose plugin A needs a library that is absent, and whose plugin B loads."""
    monkeypatch.setattr(
        sys.modules["fake_nixl_api"], "__file__", str(tmp_path / "nixl_cu13" / "_api.py"), raising=False
    )
    folder = tmp_path / "nixl_cu13.libs" / "nixl"
    folder.mkdir(parents=True)
    (folder / "libplugin_A.so").write_bytes(b"")
    (folder / "libplugin_B.so").symlink_to(next(Path("/usr/lib").rglob("libc.so.6")))
    return folder


def test_a_backend_that_cannot_be_loaded_is_explained(agent_class: Any, plugins: Path) -> None:
    explanation = explain_missing_backend(agent_class, ["B", "A"])
    assert explanation is not None
    assert "backend A cannot be loaded" in explanation
    assert "file too short" in explanation


def test_a_backend_that_is_not_there_is_explained(agent_class: Any, plugins: Path) -> None:
    explanation = explain_missing_backend(agent_class, ["C"])
    assert explanation is not None
    assert f"{plugins / 'libplugin_C.so'} is missing" in explanation


def test_backends_that_load_explain_nothing(agent_class: Any, plugins: Path) -> None:
    assert explain_missing_backend(agent_class, ["B"]) is None


def test_ucx_is_corrected_before_its_backend_is_made(
    agent_class: Any, plugins: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (plugins / "libplugin_UCX.so").symlink_to((plugins / "libplugin_B.so").readlink())
    corrected: list[str] = []
    monkeypatch.setattr(agent_module, "zero_requests", lambda library: corrected.append(library._name))
    with agent_settings(agent_class, 5000):
        agent = agent_class()
    assert agent.inner.createBackend("LIBFABRIC", {}) == ("LIBFABRIC", {})
    assert corrected == []
    assert agent.inner.createBackend("UCX", {"a": "b"}) == ("UCX", {"a": "b"})
    assert corrected == [str(plugins / "libplugin_UCX.so")]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("plugin", "reason"), [(None, "No such file"), ("libplugin_B.so", "this UCX has other symbols")]
)
def test_a_ucx_that_cannot_be_corrected_is_used_with_a_warning(
    agent_class: Any, plugins: Path, caplog: pytest.LogCaptureFixture, plugin: str | None, reason: str
) -> None:
    if plugin is not None:
        (plugins / "libplugin_UCX.so").symlink_to((plugins / plugin).readlink())
    with agent_settings(agent_class, 5000):
        agent = agent_class()
    assert agent.inner.createBackend("UCX", {}) == ("UCX", {})
    assert "A peer that ends while it reads from this engine may end it, too" in caplog.text
    assert reason in caplog.text


def test_transfers_are_sorted_and_carry_no_notification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bidikv_runtime.connector.agent.sort_pairs", lambda local, remote: (local[::-1], remote[::-1]))

    class Agent:
        def make_prepped_xfer(self, *arguments: Any, notif_msg: bytes = b"", **options: Any) -> Any:
            return arguments, notif_msg, options

        def send_notif(self, *arguments: Any, **options: Any) -> None:
            raise AssertionError("a notification was sent")

        def transfer(self, handle: int) -> int:
            return handle

    agent = ReadingAgent(Agent())
    assert agent.make_prepped_xfer("READ", 1, [8, 7], 2, [6, 5], notif_msg=b"done", backends=["UCX"]) == (
        ("READ", 1, [7, 8], 2, [5, 6]),
        b"",
        {"backends": ["UCX"]},
    )
    agent.send_notif("peer", notif_msg=b"done")
    assert agent.transfer(7) == 7


def test_telemetry_is_kept_until_it_is_taken() -> None:
    class Agent:
        def get_xfer_telemetry(self, handle: str) -> str:
            return f"of {handle}"

    agent = ReadingAgent(Agent())
    assert agent.get_xfer_telemetry("a") == "of a"
    agent.get_xfer_telemetry("b")
    assert agent.take_telemetry(["a", "never ended"]) == ["of a"]
    assert agent.take_telemetry(["a", "b"]) == ["of b"]


def test_the_shape_of_a_prepared_list_is_known_until_its_release() -> None:
    class Descriptors(list[tuple[int, int, int]]):
        def descCount(self) -> int:
            return len(self)

    class Agent:
        def prep_xfer_dlist(self, agent_name: str, descriptors: Any) -> str:
            return agent_name

        def release_dlist_handle(self, handle: str) -> None:
            pass

    agent = ReadingAgent(Agent())
    handle = agent.prep_xfer_dlist("peer", Descriptors([(4096, 512, 0), (8192, 512, 0)]))
    assert agent.shape_of(handle) == (512, 2)
    agent.release_dlist_handle(handle)
    assert agent.shape_of(handle) is None
