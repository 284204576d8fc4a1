"""``extraArgs`` and ``env`` of engines: what the operator owns in them."""

from __future__ import annotations

from typing import Final

from bidikv_operator.api.pods import EnvVar
from bidikv_operator.api.v1alpha1 import FOREIGN_FLAGS, OWNED_FLAGS, SHORT_FLAGS
from bidikv_operator.validate.problem import Problem, Problems
from bidikv_runtime import contract

OWNED_ENV: Final = (
    "PYTHONHASHSEED",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    contract.ENV_LOOKUP_HOST,
    contract.ENV_TOKEN_FILE,
)
"""Engine variables on which both roles must agree, that name the pod's own address or the peers' token."""


def check_extra_args(field: str, args: list[str]) -> Problems:
    return [
        Problem(field, f"{arg.split('=')[0]} means {owned}, which belongs to the operator; remove it")
        for arg in args
        if (owned := find_owned_flag(arg)) is not None
    ]


def find_owned_flag(arg: str) -> str | None:
    """The owned flag that vLLM would read ``arg`` as, or None.

    vLLM's parser (``utils/argparse_utils.py``, 0.32) turns underscores into dashes, takes ``--flag=value``,
    ``--flag.key value`` and ``-n2``, and, as argparse does, any unambiguous beginning of a flag. The last one given
    wins, so each of these would silently replace the operator's value. No flag of vLLM 0.32 outside of the list begins
    an owned one, but for ``FOREIGN_FLAGS``.
    """
    if not arg.startswith("-") or arg in ("-", "--"):
        return None
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if flag in FOREIGN_FLAGS:
        return None
    owned = next((owned for owned in OWNED_FLAGS if owned.startswith(flag)), None)
    return owned or next((short for short in SHORT_FLAGS if flag.startswith(short)), None)


def check_env(field: str, variables: list[EnvVar]) -> Problems:
    problems = []
    seen: set[str] = set()
    for variable in variables:
        if variable.name in OWNED_ENV:
            problems.append(Problem(field, f"{variable.name} is set by the operator; remove it"))
        if variable.name in seen:
            problems.append(Problem(field, f"{variable.name} is given twice; keep one"))
        seen.add(variable.name)
    return problems
