"""A simulated engine as a process: what starts it, how it ends, and the faults that only a process can have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator.build.engine_pod import build_engine_template
from bidikv_operator.tests import samples
from bidikv_runtime import contract
from bidikv_runtime.install import install
from e2e.engine.local import free_port
from e2e.simengine.local import AS_VLLM, HOST, ROOT, SERVED_MODEL, SimulatedEngine

WAIT_SECONDS = 30.0

Make = Callable[..., SimulatedEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes engines, which are stopped afterwards."""
    made: list[SimulatedEngine] = []

    def build(**options: Any) -> SimulatedEngine:
        engine = SimulatedEngine("engine", tmp_path / "engine.log", **options)
        made.append(engine)
        engine.start()
        return engine

    yield build
    for engine in made:
        engine.stop()


def ask(url: str, **parameters: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **parameters}
    with urllib.request.urlopen(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), timeout=WAIT_SECONDS
    ) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def wait_until(look: Callable[[], bool], engine: SimulatedEngine) -> None:
    """Look until it is so, while the engine lives."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not look():
        assert engine.process.poll() is None, engine.log_end()
        assert time.monotonic() < deadline, engine.log_end()
        time.sleep(0.05)


def is_refused(call: Callable[[], Any]) -> bool:
    """Whether there is nobody who takes the connection."""
    try:
        call()
    except urllib.error.HTTPError:
        return False
    except (urllib.error.URLError, ConnectionError):
        return True
    return False


def resolve_environment(container: Mapping[str, Any]) -> dict[str, str]:
    """A container's environment as a kubelet on loopback would set it."""
    return {entry["name"]: entry.get("value", HOST if "valueFrom" in entry else "") for entry in container["env"]}


def test_the_operators_pod_starts_it(tmp_path: Path) -> None:
    """Command, arguments and environment are the operator's; only what must differ on a shared machine is replaced."""
    install(tmp_path / "connector")
    resource = samples.make_resource(
        decode={"replicas": 1, "gpusPerPod": 0}, model={"source": {"path": "/models/small"}, "maxLength": 4096}
    )
    template = build_engine_template(samples.resolve(resource), "decode")
    [container] = template["spec"]["containers"]
    environment = resolve_environment(container)
    assert environment["PYTHONPATH"] == contract.CONNECTOR_INSTALL_DIR
    environment["PYTHONPATH"] = f"{tmp_path / 'connector'}:{AS_VLLM}:{ROOT}"  # the image has the latter two elsewhere
    assert environment[contract.ENV_TOKEN_FILE] == f"{contract.TOKEN_DIR}/{contract.TOKEN_KEY}"
    token = tmp_path / "tokens"
    token.write_text("token-of-all-engines\n")
    environment[contract.ENV_TOKEN_FILE] = str(token)
    ports = {name: free_port() for name in ("http", "lookup", "state")}
    transfer = contract.kv_transfer_config(fabric="TCP", lookup_port=ports["lookup"])
    transfer["kv_connector_extra_config"]["bidikv_state_port"] = ports["state"]
    command: list[str] = container["command"]
    assert command[0] == "python3"
    arguments = command[1:] + container["args"]
    arguments += ["--port", str(ports["http"]), "--kv-transfer-config", json.dumps(transfer)]
    engine = SimulatedEngine("engine", tmp_path / "log", port=ports["http"])
    with engine.log.open("ab") as log:
        engine._process = subprocess.Popen(
            [sys.executable, *arguments], env=os.environ | environment, stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        engine.wait_ready()
        assert ask(engine.url, model="chat")["usage"]["completion_tokens"] >= 1
        report = urllib.request.Request(
            f"http://{HOST}:{ports['state']}{contract.REPORT_PATH}",
            headers={"Authorization": "Bearer token-of-all-engines"},
        )
        with urllib.request.urlopen(report, timeout=10) as response:
            assert json.load(response)["requests"] == 0
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[:3] == ["python3", "-m", contract.DRAIN_MODULE]
        flags = [*hook[3:], "--leave-seconds=0.1", f"--state-port={ports['state']}"]
        drained = subprocess.run(
            [sys.executable, *hook[1:3], *flags],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert "nothing is left" in drained.stdout, drained
        engine.terminate()
        assert engine.process.wait(WAIT_SECONDS) == 0, engine.log_end()
    finally:
        engine.stop()


def test_it_finishes_what_it_has_when_it_is_ended(make: Make) -> None:
    engine = make(arguments=["--shutdown-timeout", "60"], simulation={"step_seconds": 0.02})
    engine.wait_ready()
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"{engine.url}/v1/chat/completions", data, timeout=WAIT_SECONDS) as response:
        response.readline()
        engine.terminate()
        lines = response.read().splitlines()
    assert lines[-2] == b"data: [DONE]"
    assert json.loads(lines[-4][6:])["choices"][0]["finish_reason"] == "length"
    assert engine.process.wait(WAIT_SECONDS) == 0, engine.log_end()


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("model_not_found", f"Can't load the configuration of '{SERVED_MODEL}'"),
        ("no_kv_cache", "No available memory for the cache blocks"),
    ],
)
def test_a_start_that_fails_says_vllms_last_words(make: Make, start: str, words: str) -> None:
    engine = make(faults={"start": start})
    assert engine.process.wait(WAIT_SECONDS) == 1
    assert words in engine.log_end()


def test_a_start_that_takes_too_much_memory_is_killed(make: Make) -> None:
    assert make(faults={"start": "out_of_memory"}).process.wait(WAIT_SECONDS) == -9  # a container's status of 137


def test_connections_are_refused_until_the_fault_is_healed_and_a_crash_has_its_exit_status(make: Make) -> None:
    engine = make()
    engine.wait_ready()
    first = ask(engine.url)["choices"]
    engine.set_faults(refuse=True)
    wait_until(lambda: is_refused(lambda: ask(engine.url)), engine)
    engine.set_faults()
    engine.wait_ready()
    assert ask(engine.url)["choices"] == first
    engine.set_faults(crash=True, exit_code=7)
    assert engine.process.wait(WAIT_SECONDS) == 7


def test_a_start_that_hangs_goes_on_when_it_is_healed(make: Make) -> None:
    engine = make(faults={"start": "never"})
    wait_until(lambda: not is_refused(lambda: engine.set_faults(start="never")), engine)
    assert is_refused(lambda: ask(engine.url))
    engine.set_faults()
    engine.wait_ready()
    assert ask(engine.url)["choices"]


def test_a_signal_ends_a_start_that_hangs(make: Make) -> None:
    engine = make(faults={"start": "never"})
    wait_until(lambda: not is_refused(lambda: engine.set_faults(start="never")), engine)
    engine.terminate()
    assert engine.process.wait(WAIT_SECONDS) == 143
