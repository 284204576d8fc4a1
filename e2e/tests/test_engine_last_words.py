"""Real engines that cannot start: what they leave in the termination message, and what the status makes of it.

The package is installed as in a pod: vLLM finds the plugin by the metadata beside it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from bidikv_operator.status.last_words import find_cause
from bidikv_runtime.connector.last_words import ENV_FILE
from bidikv_runtime.install import install
from e2e.engine.local import EngineError, LocalEngine
from e2e.engine.provision import TINY_LINK

pytestmark = pytest.mark.engine


def test_what_ended_an_engine_reaches_the_status(tmp_path: Path) -> None:
    path = tmp_path / "path"
    install(path)

    def make(name: str, *arguments: str, **settings: int) -> LocalEngine:
        file = tmp_path / f"{name}.termination"
        file.touch()
        return LocalEngine(
            name,
            tmp_path / f"{name}.log",
            arguments=arguments,
            environment={"PYTHONPATH": str(path), ENV_FILE: str(file)},
            model=TINY_LINK,
            settings=settings,
        )

    # The first fails in the engine core, the second in its worker.
    engines = (make("small", "--num-gpu-blocks-override", "2"), make("wrong", bidikv_no_such_key=1))
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            with pytest.raises(EngineError, match="ended with"):
                engine.wait_ready()
    small, wrong = (find_cause((tmp_path / f"{engine.name}.termination").read_text()) for engine in engines)
    assert small is not None
    assert small.reason == "OutOfMemory"
    assert "larger than the available KV cache memory" in small.words
    assert wrong is not None
    assert wrong.reason == "ContainerCrashing"
    assert wrong.words.startswith("kv_connector_extra_config has the unknown key 'bidikv_no_such_key'")
    for engine in engines:
        end = engine.log.read_text(errors="replace")[-2048:]
        assert "has the unknown key" not in end, "the kubelet's own choice would have been enough"
        assert "larger than the available" not in end, "the kubelet's own choice would have been enough"
