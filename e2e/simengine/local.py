"""Simulated engines as processes of this machine, on loopback, with the operator's command line.

Every wait has a deadline, and a failed start says why with the end of the engine's log. An engine ends by itself when
the process that started it dies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bidikv_runtime import contract
from bidikv_runtime.router.choice.endpoints import Endpoint
from e2e.engine.local import free_port
from e2e.simengine.settings import PREFIX

ROOT: Final = Path(__file__).resolve().parents[2]
AS_VLLM: Final = Path(__file__).parent / "as_vllm"
HOST: Final = "127.0.0.1"
SERVED_MODEL: Final = "simulated"
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0
PATIENCE: Final = {"bidikv_lookup_deadline_ms": 2000, "bidikv_validate_deadline_ms": 5000}
"""As for real engines on a busy machine."""


class SimulationError(RuntimeError):
    """An engine did not start or did not become ready."""


@dataclass
class SimulatedEngine:
    """One engine; its ports stay the same over restarts."""

    name: str
    log: Path
    arguments: Sequence[str] = ()
    """More of vLLM's."""
    simulation: Mapping[str, Any] = field(default_factory=dict)
    """By the names of ``settings.Simulation``."""
    faults: Mapping[str, Any] = field(default_factory=dict)
    """The first ones (``faults.FaultSet``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the connector (``bidikv_*``)."""
    port: int = field(default_factory=free_port)
    lookup_port: int = field(default_factory=free_port)
    state_port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        """As a router knows it."""
        return Endpoint(HOST, self.port, self.lookup_port, state_port=self.state_port)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() comes first"
        return self._process

    def start(self) -> None:
        """Start the process; ``wait_ready`` waits for it."""
        transfer = contract.kv_transfer_config(fabric="TCP", lookup_port=self.lookup_port)
        transfer["kv_connector_extra_config"] |= PATIENCE | {"bidikv_state_port": self.state_port} | dict(self.settings)
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", SERVED_MODEL, "--host", HOST, "--port", str(self.port)),
            *("--enable-prefix-caching", "--prefix-caching-hash-algo", contract.HASH_ALGORITHM),
            *("--kv-transfer-config", json.dumps(transfer), "--middleware", contract.ENGINE_MIDDLEWARE),
            *self.arguments,
        ]
        simulation = {"control_port": self.control_port, "faults": json.dumps(dict(self.faults)), **self.simulation}
        variables = {
            "PYTHONPATH": f"{AS_VLLM}:{ROOT / 'runtime'}:{ROOT}",
            "PYTHONHASHSEED": contract.HASH_SEED,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            contract.ENV_LOOKUP_HOST: HOST,
            **{PREFIX + name.upper(): str(value) for name, value in simulation.items()},
            **self.environment,
        }
        # The kernel ends the engine when its parent dies, so an interrupted test run leaves none behind.
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(guard + command, env=os.environ | variables, stdout=log, stderr=log)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the engine answers its health check.

        Raises:
            SimulationError: it ended or passed the deadline; the message holds the end of its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SimulationError(f"engine {self.name} ended with {self.process.returncode}:\n{self.log_end()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise SimulationError(f"engine {self.name} is not ready after {seconds:.0f} s:\n{self.log_end()}")

    def log_end(self, lines: int = 40) -> str:
        """The last lines of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def set_faults(self, **faults: Any) -> None:
        """These faults and no others, from now on."""
        data = json.dumps(faults).encode()
        with urllib.request.urlopen(f"http://{HOST}:{self.control_port}/faults", data=data, timeout=10):
            pass

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; whether it did (it refuses while blocks are in use)."""
        with urllib.request.urlopen(f"{self.url}/reset_prefix_cache", data=b"{}", timeout=10) as response:
            return bool(json.load(response)["success"])

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def terminate(self) -> None:
        """Ask it to end, as a kubelet does first."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it, if it has been started."""
        if self._process is not None and self._process.poll() is None:
            self.kill()


@contextmanager
def running(*engines: SimulatedEngine) -> Iterator[None]:
    """Engines that are ready within, all started at once, and stopped afterwards."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            engine.stop()
