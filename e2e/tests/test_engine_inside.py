"""Run the tests of ``e2e/engine/inside`` with the engine's interpreter: they drive vLLM's own classes, without a model.

pytest is this environment's own, put behind the engine's packages: what runs in engine pods stays free of test tools.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bidikv_runtime import contract
from e2e.engine.local import HOST, ROOT
from e2e.engine.provision import ENGINE_LINK

pytestmark = pytest.mark.engine

INSIDE = ROOT / "e2e" / "engine" / "inside"
LIMIT_SECONDS = 560
"""A minute on an idle machine."""
START = """
import sys
sys.path.append(sys.argv[1])
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", sorted(INSIDE.glob("test_*.py")), ids=lambda module: module.stem)
def test_inside(module: Path) -> None:
    packages = Path(pytest.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}",
        "PYTHONHASHSEED": contract.HASH_SEED,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        contract.ENV_LOOKUP_HOST: HOST,
    }
    options = ("-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", str(module))
    done = subprocess.run(
        [str(ENGINE_LINK / "bin" / "python"), "-c", START, str(packages), *options],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-5_000:]
