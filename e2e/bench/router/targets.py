"""The programs of the bench: mock engines, our router, vllm-router and the toy proxy, each in its best setting."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bidikv_runtime.contract import RouterConfig
from e2e.bench.processes import Guard
from e2e.bench.router.tools import Tools

PREFILL: Final = ("127.0.1.1", "127.0.1.2")
DECODE: Final = ("127.0.1.3", "127.0.1.4")
"""Each mock engine has an address of its own, for all engines have the same ports."""
HOST: Final = "127.0.0.1"
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 5.0
ASK_SECONDS: Final = 10.0
TOY: Final = Path(__file__).parent / "toy_proxy.py"

OURS, PEER, TOY_PROXY, LOCAL, BEFORE, DIRECT = "ours", "vllm-router", "toy", "ours-local", "before", "direct"
TOKENS = "ours-tokens"


class BenchError(Exception):
    """The bench cannot go on; one sentence."""


@dataclass(frozen=True)
class Ports:
    """Free ports, chosen once."""

    engine: int
    state: int


@dataclass
class Process:
    """A program of the bench: pinned to a core, in a process group of its own, its output in a log."""

    name: str
    command: Sequence[str]
    core: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def start(self, guard: Guard) -> None:
        """Start it; ``guard`` sees to it that it does not outlive the bench."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # No proxy leads to this machine's own addresses, and reqwest and httpx would ask the environment for one.
        inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(self.core), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | self.environment,
                start_new_session=True,
            )
        guard(self._process.pid)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until it is ready.

        Raises:
            BenchError: it ended, or did not get ready in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while not is_ready():
            if self._process is None or self._process.poll() is not None:
                raise BenchError(f"{self.name} ended at its start; its output is in {self.log}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} was not ready after {START_SECONDS:.0f} s; its output is in {self.log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(STOP_SECONDS)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.wait(STOP_SECONDS)


class Engines:
    """The mock engines, and what their state ports tell."""

    def __init__(self, tools: Tools, ports: Ports, core: int, logs: Path) -> None:
        self.ports = ports
        addresses = [
            part
            for role, hosts in (("prefill", PREFILL), ("decode", DECODE))
            for h in hosts
            for part in (f"--{role}", h)
        ]
        ports_given = ["--port", str(ports.engine), "--state-port", str(ports.state)]
        self.process = Process("mock", [str(tools.mock), *ports_given, *addresses], core, logs / "mock.log")

    def start(self, guard: Guard) -> None:
        """Start them and wait until they listen."""
        self.process.start(guard)
        self.process.wait_until(lambda: self.process.log.read_bytes().startswith(b"ready"))

    def set(self, **settings: int) -> None:
        """Change what they answer (see ``c/mock.c``)."""
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        self._ask(DECODE[0], f"/settings?{query}")

    def count(self, hosts: Sequence[str]) -> tuple[int, int]:
        """Requests and bytes of bodies that the engines ``hosts`` got so far."""
        counted = [json.loads(self._ask(host, "/counters")) for host in hosts]
        return sum(c["requests"] for c in counted), sum(c["body_bytes"] for c in counted)

    def read_last(self, host: str) -> bytes:
        """The last body that the engine got while bodies were kept."""
        return self._ask(host, "/last")

    def address(self, host: str) -> str:
        """Where the engine serves requests."""
        return f"{host}:{self.ports.engine}"

    def _ask(self, host: str, target: str) -> bytes:
        status, body = fetch(f"{host}:{self.ports.state}", target)
        if status != 200:
            raise BenchError(f"the mock engine answered {status} to {target}")
        return body


@dataclass
class Target:
    """A router under test."""

    name: str
    address: str
    process: Process

    def start(self, guard: Guard) -> None:
        """Start it and wait until it says that it is healthy."""
        self.process.start(guard)
        self.process.wait_until(self._is_healthy)

    def _is_healthy(self) -> bool:
        try:
            return fetch(self.address, "/health")[0] == 200
        except OSError:
            return False


def build_ours(
    name: str,
    engines: Engines,
    core: int,
    logs: Path,
    *,
    local_limit_tokens: int = 0,
    token_ids: bool = False,
    source: Path | None = None,
) -> Target:
    """Our router with all features on.

    Args:
        name: of the target.
        engines: behind it.
        core: that it gets.
        logs: folder of its files.
        local_limit_tokens: 0 for two legs always, as the peers send.
        token_ids: carry prefill's token ids to decode, which no peer does.
        source: another checkout's folder ``runtime``.
    """
    config = RouterConfig(
        namespace="", prefill_service="", decode_service="", served_model_name="", state_port=engines.ports.state,
        local_limit_tokens=local_limit_tokens,
    )  # fmt: skip
    file = logs / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_build_known_config(config, source))
    port = choose_port()
    listed = {"prefill": PREFILL, "decode": DECODE}
    static = [
        part for role, hosts in listed.items() for part in (f"--static-{role}", ",".join(map(engines.address, hosts)))
    ]
    command = [
        sys.executable,
        "-m",
        "bidikv_runtime.router",
        "--config",
        str(file),
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    options = ["--log-level", "ERROR", "--drain-delay-seconds", "0"]
    if source is None and not token_ids:  # earlier releases did not know them
        options += ["--token-ids-from", "0"]
    environment = {"PYTHONPATH": str(source)} if source is not None else {}
    return Target(
        name, f"{HOST}:{port}", Process(name, [*command, *static, *options], core, logs / f"{name}.log", environment)
    )


def _build_known_config(config: RouterConfig, source: Path | None) -> str:
    """The configuration as JSON, without fields that an older router does not have and would not miss."""
    values = asdict(config)
    if source is not None:
        text = (source / "bidikv_runtime" / "contract.py").read_text()
        values = {name: value for name, value in values.items() if f"    {name}: " in text}
    return json.dumps(values)


def build_peer(engines: Engines, environment: Path, core: int, logs: Path) -> Target:
    """vllm-router in the setting in which it is fastest: its default policy and log level cost half of its speed."""
    port = choose_port()
    urls = [
        part
        for role, hosts in (("prefill", PREFILL), ("decode", DECODE))
        for h in hosts
        for part in (f"--{role}", f"http://{engines.address(h)}")
    ]
    command = [
        str(environment / "bin" / "vllm-router"),
        "--host",
        HOST,
        "--port",
        str(port),
        "--vllm-pd-disaggregation",
        *urls,
    ]
    options = ["--policy", "consistent_hash", "--log-level", "error", "--prometheus-port", str(choose_port())]
    startup = ["--worker-startup-check-interval", "1"]
    return Target(PEER, f"{HOST}:{port}", Process(PEER, [*command, *options, *startup], core, logs / f"{PEER}.log"))


def build_toy(engines: Engines, environment: Path, core: int, logs: Path) -> Target:
    """The FastAPI and httpx proxy."""
    port = choose_port()
    urls = [",".join(f"http://{engines.address(host)}" for host in hosts) for hosts in (PREFILL, DECODE)]
    command = [str(environment / "bin" / "python"), str(TOY), str(port), *urls]
    return Target(TOY_PROXY, f"{HOST}:{port}", Process(TOY_PROXY, command, core, logs / f"{TOY_PROXY}.log"))


def choose_port(hosts: Sequence[str] = (HOST,)) -> int:
    """A port that is free at all ``hosts``."""
    for _ in range(50):
        with socket.socket() as first:
            first.bind((hosts[0], 0))
            port: int = first.getsockname()[1]
            try:
                for host in hosts[1:]:
                    with socket.socket() as other:
                        other.bind((host, port))
            except OSError:
                continue
            return port
    raise BenchError(f"found no port that is free at {', '.join(hosts)}")


def choose_ports() -> Ports:
    """For the mock engines."""
    hosts = (*PREFILL, *DECODE)
    engine = choose_port(hosts)
    while (state := choose_port(hosts)) == engine:
        pass
    return Ports(engine, state)


def fetch(
    address: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """One request of the bench itself; raises OSError when there is no answer."""
    connection = http.client.HTTPConnection(address, timeout=ASK_SECONDS)
    try:
        connection.request("GET" if body is None else "POST", target, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{address} gave no valid answer: {error!r}") from error
    finally:
        connection.close()
