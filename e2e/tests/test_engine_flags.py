"""The CRD's rule on ``extraArgs`` against vLLM's real parser: it refuses the operator's flags in every spelling,
and no other flag.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from bidikv_operator.api.v1alpha1 import FOREIGN_FLAGS, OWNED_FLAGS
from e2e.engine.provision import ENGINE_LINK

pytestmark = pytest.mark.engine

LIST_OPTIONS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._option_string_actions.values()
print(json.dumps(list({id(action): action.option_strings for action in actions}.values())))
"""


@pytest.fixture(scope="module")
def options() -> list[list[str]]:
    """The spellings of each option of vLLM's OpenAI server."""
    argv = [str(ENGINE_LINK / "bin" / "python"), "-c", LIST_OPTIONS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
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
