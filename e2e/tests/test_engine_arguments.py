"""The command lines that the operator writes, read by vLLM's real parser: every golden engine's."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from e2e.engine.provision import ENGINE_LINK
from e2e.install import ROOT

pytestmark = pytest.mark.engine

GOLDEN = ROOT / "operator" / "bidikv_operator" / "tests" / "golden"
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
lines = json.load(sys.stdin)
print(json.dumps({name: vars(parser.parse_args(line)) for name, line in lines.items()}, default=repr))
"""
Object = dict[str, Any]


def list_command_lines() -> dict[str, list[str]]:
    """Arguments behind the module, by case and role; variables as a worker's kubelet expands them."""
    lines = {}
    for path in sorted(GOLDEN.glob("*/*.yaml")):
        spec = yaml.safe_load(path.read_text()).get("spec", {})
        nested = spec.get("leaderWorkerTemplate", {})
        for template in (spec.get("template"), nested.get("leaderTemplate"), nested.get("workerTemplate")):
            for container in (template or {}).get("spec", {}).get("containers", []):
                if container["name"] == "engine":
                    words = [*container["command"][3:], *container["args"]]
                    role = template["metadata"]["labels"]["serving.bidikv.io/role"]
                    lines[f"{path.parent.name} {role}"] = [
                        word.replace("$(LWS_WORKER_INDEX)", "1").replace("$(LWS_LEADER_ADDRESS)", "10.0.0.1")
                        for word in words
                        if word != "serve"
                    ]
    return lines


@pytest.fixture(scope="module")
def parsed() -> dict[str, Object]:
    done = subprocess.run(
        [str(ENGINE_LINK / "bin" / "python"), "-c", PARSE],
        input=json.dumps(list_command_lines()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_case_has_both_roles(parsed: dict[str, Object]) -> None:
    cases = {path.name for path in GOLDEN.iterdir()}
    assert {f"{case} {role}" for case in cases for role in ("prefill", "decode")} <= set(parsed)


def test_parallelism(parsed: dict[str, Object]) -> None:
    prefill = parsed["everything prefill"]
    assert (prefill["tensor_parallel_size"], prefill["data_parallel_size"]) == (2, 4)
    assert prefill["enable_expert_parallel"] is True
    assert parsed["tcp prefill"]["data_parallel_size"] == 1


def test_adapters(parsed: dict[str, Object]) -> None:
    prefill = parsed["everything prefill"]
    assert prefill["enable_lora"] is True
    assert (prefill["max_loras"], prefill["max_lora_rank"]) == (2, 64)
    assert [module.split("'")[1] for module in prefill["lora_modules"]] == ["law", "code"]
    assert parsed["tcp prefill"]["lora_modules"] is None


def test_replicas_over_nodes(parsed: dict[str, Object]) -> None:
    first, worker = parsed["nodes prefill"], parsed["nodes prefill-worker"]
    assert (first["nnodes"], first["node_rank"], first["headless"]) == (2, 0, False)
    assert (worker["nnodes"], worker["node_rank"], worker["headless"]) == (2, 1, True)
    assert first["master_addr"] == worker["master_addr"] == "10.0.0.1"
    assert first["master_port"] == worker["master_port"]


def test_the_rest(parsed: dict[str, Object]) -> None:
    for name, arguments in parsed.items():
        assert arguments["enable_prefix_caching"] is True, name
        assert arguments["shutdown_timeout"] == 600, name
        assert arguments["middleware"], name
    assert parsed["tcp prefill"]["dtype"] == "float32", "the user's own"
