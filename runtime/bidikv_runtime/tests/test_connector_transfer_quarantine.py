"""Abandoned transfers are watched until they have ended, and released no earlier."""

from __future__ import annotations

from bidikv_runtime.connector.transfer_quarantine import TransferQuarantine


class Agent:
    """A NIXL agent whose transfers end when the test says so."""

    def __init__(self) -> None:
        self.states: dict[str, str | Exception] = {}
        self.stubborn: set[str] = set()
        self.released: list[str] = []

    def check_xfer_state(self, handle: str) -> str:
        state = self.states[handle]
        if isinstance(state, Exception):
            raise state
        return state

    def release_xfer_handle(self, handle: str) -> None:
        if handle in self.stubborn:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.released.append(handle)


def test_a_transfer_under_way_is_never_released() -> None:
    agent = Agent()
    quarantine = TransferQuarantine(agent)
    agent.states = {"x": "PROC", "y": "PROC"}
    assert quarantine.hold("r", "r", "engine", ["x", "y"])
    assert quarantine.poll() == ([], [])
    agent.states["x"] = "DONE"
    assert quarantine.poll() == ([], [])
    assert agent.released == ["x"]
    assert (len(quarantine), quarantine.engines) == (1, {"engine"})
    agent.states["y"] = "DONE"
    assert quarantine.poll() == (["r"], ["r"])
    assert agent.released == ["x", "y"]
    assert (len(quarantine), quarantine.engines) == (0, set())
    assert quarantine.poll() == ([], [])


def test_a_request_is_released_with_its_last_part() -> None:
    agent = Agent()
    quarantine = TransferQuarantine(agent)
    agent.states = {"x": "PROC", "y": "PROC", "z": "PROC"}
    assert quarantine.hold("r", "r", "one", ["x"])
    assert not quarantine.hold("r/1", "r", "two", ["y"])
    assert quarantine.hold("s", "s", "two", ["z"])
    agent.states["x"] = "DONE"
    assert quarantine.poll() == (["r"], [])
    agent.states["y"] = "DONE"
    assert quarantine.poll() == (["r/1"], ["r"])
    assert quarantine.engines == {"two"}


def test_a_failed_transfer_has_ended_once_nixl_lets_it_go() -> None:
    agent = Agent()
    quarantine = TransferQuarantine(agent)
    agent.states = {"error": "ERR", "gone": RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")}
    agent.stubborn = {"error", "gone"}
    quarantine.hold("r", "r", "engine", ["error", "gone"])
    assert quarantine.poll() == ([], [])
    agent.stubborn = set()
    assert quarantine.poll() == (["r"], ["r"])


def test_a_stop_lets_go_of_everything() -> None:
    agent = Agent()
    quarantine = TransferQuarantine(agent)
    agent.states = {"x": "PROC", "y": "PROC"}
    agent.stubborn = {"x"}
    quarantine.hold("r", "r", "engine", ["x", "y"])
    quarantine.close()
    assert (agent.released, len(quarantine)) == (["y"], 0)
