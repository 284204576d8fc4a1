"""Every child, in full, against reviewed YAML.

After an intended change: ``BIDIKV_UPDATE_GOLDEN=1 pytest operator -k golden``, then review the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from bidikv_operator.build import build_all
from bidikv_operator.tests.samples import EFA, TCP, resolve

GOLDEN = Path(__file__).parent / "golden"
CASES = {"tcp": TCP, "efa": EFA}


def render(case: str) -> dict[str, str]:
    """File name to YAML text of each child."""
    found = {}
    for kind, manifest in build_all(resolve(CASES[case])):
        name = f"{case}/{kind.kind.lower()}-{manifest['metadata']['name']}.yaml"
        assert name not in found, "two children of one kind and name"
        found[name] = yaml.safe_dump(manifest, sort_keys=False, width=120)
    return found


@pytest.mark.parametrize("case", CASES)
def test_children_equal_the_golden_files(case: str) -> None:
    rendered = render(case)
    folder = GOLDEN / case
    if os.environ.get("BIDIKV_UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.yaml"):
            path.unlink()
        for name, text in rendered.items():
            (GOLDEN / name).write_text(text)
    assert {f"{case}/{path.name}" for path in folder.glob("*.yaml")} == set(rendered)
    for name, text in rendered.items():
        assert (GOLDEN / name).read_text() == text, name


@pytest.mark.parametrize("case", CASES)
def test_order_of_writing(case: str) -> None:
    kinds: list[Any] = [kind.kind for kind, _ in build_all(resolve(CASES[case]))]
    for earlier in ("ServiceAccount", "RoleBinding", "ConfigMap", "Service"):
        last = max(index for index, kind in enumerate(kinds) if kind == earlier)
        assert last < kinds.index("Deployment")
