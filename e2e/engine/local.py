"""Real vLLM engines as processes of this machine, on loopback, for the tests of the KV connector.

Every wait has a deadline, and a failed start says why with the end of the engine's log. An engine runs in a process
group of its own, which ``stop`` ends; it also ends by itself when the process that started it dies.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bidikv_runtime import contract
from e2e.engine import turn
from e2e.engine.provision import ENGINE_LINK, MODEL_LINK

ROOT = Path(__file__).resolve().parents[2]
SERVED_MODEL = "demo"
HOST = "127.0.0.1"
BLOCK_SIZE = 32
"""The CPU attention backend takes multiples of 32 only."""
START_SECONDS = 300.0
"""An engine takes 25 s on an idle machine; the limit is for two cores that are busy with more."""
STOP_SECONDS = 20.0
PATIENCE = {
    "bidikv_lookup_deadline_ms": 2000,
    "bidikv_validate_deadline_ms": 5000,
    "bidikv_connect_deadline_ms": 2000,
}
"""Longer than the product's deadlines: the engines share two cores, a slow answer must not pass for a silent source."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self",  # what pods have; shared memory needs one IPC namespace
    "UCX_NET_DEVICES": "lo",
    "PYTHONHASHSEED": contract.HASH_SEED,
}


K = TypeVar("K")


class EngineError(RuntimeError):
    """An engine did not start or did not become ready."""


_given: set[int] = set()


def free_port() -> int:
    """A port that was free a moment ago, that this process has not given out before, and that no outgoing connection
    takes: those have ports from 32768 on. The three behind it are given to nobody: ranks count from their engine's."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000, 4)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            _given.add(port)
            return port


@contextmanager
def running(engines: Mapping[K, LocalEngine]) -> Iterator[Mapping[K, LocalEngine]]:
    """Engines that are ready within, all started at once, and stopped afterwards."""
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


@dataclass
class LocalEngine:
    """One engine; its ports stay the same over restarts."""

    name: str
    log: Path
    connector_module: str | None = contract.CONNECTOR_MODULE
    """None makes a monolith: no connector, nothing reused between engines."""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Path = MODEL_LINK
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More of the connector's settings (``bidikv_*``)."""
    port: int = field(default_factory=free_port)
    lookup_port: int = field(default_factory=free_port)
    side_channel_port: int = field(default_factory=free_port)
    state_port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _has_turn: bool = field(default=False, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def source(self) -> str:
        """Its lookup address, as a request names it."""
        return f"{HOST}:{self.lookup_port}"

    def command(self) -> list[str]:
        """vLLM's command line, with the connector as the operator configures it."""
        command = [
            str(ENGINE_LINK / "bin" / "python"),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", SERVED_MODEL),
            *("--host", HOST, "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", "8192", "--max-num-batched-tokens", "2048"),
            *("--enable-prefix-caching", "--prefix-caching-hash-algo", contract.HASH_ALGORITHM),
        ]
        if self.connector_module is not None:
            config = contract.kv_transfer_config(fabric="TCP", lookup_port=self.lookup_port)
            config["kv_connector_module_path"] = self.connector_module
            config["kv_connector_extra_config"] |= PATIENCE | {"bidikv_state_port": self.state_port}
            config["kv_connector_extra_config"] |= dict(self.settings)
            command += ["--kv-transfer-config", json.dumps(config), "--middleware", contract.ENGINE_MIDDLEWARE]
        return [*command, *self.arguments]

    def start(self) -> None:
        """Start the process; ``wait_ready`` waits for it. Several engines start faster together than in turn."""
        environment = (
            os.environ
            | ENVIRONMENT
            | {
                "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
                contract.ENV_LOOKUP_HOST: HOST,
            }
            | dict(self.environment)
        )
        if not self._has_turn:
            turn.take()
            self._has_turn = True
        # The kernel ends the engine when its parent dies, so an interrupted test run leaves none behind.
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                guard + self.command(), env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the engine answers its health check.

        Raises:
            EngineError: it ended or passed the deadline; the message holds the end of its log.
        """
        assert self._process is not None, "start() comes first"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(f"engine {self.name} ended with {self._process.returncode}:\n{self.log_end()}")
            if self._is_healthy():
                return
            time.sleep(0.25)
        raise EngineError(f"engine {self.name} is not ready after {seconds:.0f} s:\n{self.log_end()}")

    def log_end(self, lines: int = 40) -> str:
        """The last lines of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End all of the engine's processes at once, as a node failure would."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all of the engine's processes in their tracks, as a machine that hangs; its kernel still answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen engine run on."""
        self._signal(signal.SIGCONT)

    @property
    def process_group(self) -> int:
        """Number of the group that holds all of the engine's processes."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether its first process, which waits for the others, is gone."""
        return self._process is None or self._process.poll() is not None

    def terminate(self) -> None:
        """Ask the engine to end, as a kubelet does first."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the engine and free its ports."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        self.thaw()  # a frozen process ends when it runs on
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()  # also what an engine core leaves behind in the group
            if self._has_turn:
                turn.give_back()
                self._has_turn = False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGKILL:
            self._process.wait(STOP_SECONDS)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
