"""The CRD's rule on ``extraArgs`` against vLLM's real parser: it refuses the operator's flags in every spelling, and no
other flag. And the few values of vLLM's that the CRD repeats.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from bidikv_operator.api.v1alpha1 import FOREIGN_FLAGS, LORA_RANKS, OWNED_FLAGS
from e2e.engine.provision import ENGINE_LINK
from e2e.tests.schema_walk import FIELDS

pytestmark = pytest.mark.engine

LIST_OPTIONS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._option_string_actions.values()
print(json.dumps(list({id(action): action.option_strings for action in actions}.values())))
"""


LIST_RANKS = """
import json, typing
from vllm.config.lora import LoRAConfig, MaxLoRARanks
print(json.dumps([typing.get_args(MaxLoRARanks), LoRAConfig.max_lora_rank]))
"""


def ask_vllm(program: str) -> Any:
    """What a program prints that runs in the engine's environment."""
    argv = [str(ENGINE_LINK / "bin" / "python"), "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def options() -> list[list[str]]:
    """The spellings of each option of vLLM's OpenAI server."""
    found: list[list[str]] = ask_vllm(LIST_OPTIONS)
    return found


def test_the_flags_exist_and_all_their_spellings_are_owned(options: list[list[str]]) -> None:
    for flag in OWNED_FLAGS:
        (spellings,) = [option for option in options if flag in option]
        assert set(spellings) <= set(OWNED_FLAGS), f"vLLM also calls {flag} {spellings}"


def test_no_other_flag_begins_like_an_owned_one_is_spelt(options: list[list[str]]) -> None:
    """argparse takes any unambiguous beginning of a flag, so the rule refuses every beginning of an owned flag."""
    others = {spelling for option in options for spelling in option} - set(OWNED_FLAGS)
    assert others >= set(FOREIGN_FLAGS), "the rule lets a flag pass that vLLM does not have"
    hit = {other for other in others for flag in OWNED_FLAGS if flag.startswith(other)} - set(FOREIGN_FLAGS)
    assert not hit, f"the rule would also refuse {sorted(hit)}"


def test_ranks_of_adapters_are_vllm_s() -> None:
    ranks, default = ask_vllm(LIST_RANKS)
    assert tuple(ranks) == LORA_RANKS
    assert f"default of {default} when unset" in FIELDS["model.maxLoraRank"]["description"]
