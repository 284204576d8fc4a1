"""What the API says of router and connector is what they do: flags, defaults, bounds.

The operator itself knows only the contract between them, so that nothing else would notice.
"""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from pydantic.alias_generators import to_camel

from bidikv_operator.validate.router import BUFFERED_BYTES, DEFAULT_LOCAL_LIMIT_TOKENS, LIMIT_FLAGS
from bidikv_runtime.connector.settings import _CHOICES, _KEYS, Settings
from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.limits import Limits
from e2e.tests.schema_walk import FIELDS

LIMITS = {item.name.replace("_", "-"): item.default for item in fields(Limits)}
UNITS = {"": 1, " MiB": 1 << 20}


@pytest.mark.parametrize(("name", "flag"), LIMIT_FLAGS.items())
def test_a_limit_is_a_flag_of_the_router_and_says_its_default(name: str, flag: str) -> None:
    description = FIELDS[f"router.limits.{to_camel(name)}"]["description"]
    said = re.search(r"(\d+)( MiB)? when unset", description)
    assert said is not None, description
    assert int(said[1]) * UNITS[said[2] or ""] == LIMITS[flag]


def test_other_defaults_of_the_router() -> None:
    assert LIMITS["max-buffered-bytes"] == BUFFERED_BYTES
    defaults = RouterConfig(namespace="n", prefill_service="p", decode_service="d", served_model_name="m")
    assert defaults.local_limit_tokens == DEFAULT_LOCAL_LIMIT_TOKENS
    assert f"{defaults.missing_prefill} when unset" in FIELDS["router.missingPrefill"]["description"]


@pytest.mark.parametrize(
    ("name", "key", "default"),
    [
        ("budgetPercent", "bidikv_retention_budget_percent", 100 * Settings("", 1).retention_budget),
        ("idleSeconds", "bidikv_retention_idle_seconds", Settings("", 1).retention_idle),
    ],
)
def test_retention_has_the_connector_s_bounds_and_defaults(name: str, key: str, default: float) -> None:
    node = FIELDS[f"kvReuse.retention.{name}"]
    assert (node["minimum"], node["maximum"]) == (_KEYS[key].lowest, _KEYS[key].highest)
    assert f"{default:g} when unset" in node["description"]


def test_retention_has_the_connector_s_policies() -> None:
    node = FIELDS["kvReuse.retention.policy"]
    assert set(node["enum"]) == set(_CHOICES["bidikv_retention"][1])
    assert f"{Settings('', 1).retention} when unset" in node["description"]
