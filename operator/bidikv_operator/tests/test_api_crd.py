"""The CRD: generated files are current, and what it says follows the API's conventions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bidikv_operator import names
from bidikv_operator.api import crd, reference
from bidikv_operator.api.schema import VALIDATIONS

ROOT = Path(__file__).parents[3]
CRD = crd.build_crd()
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]

Fields = Iterator[tuple[str, dict[str, Any]]]


def fields(node: dict[str, Any], path: str = "") -> Fields:
    """Path and schema of ``node`` and of all below it."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from fields(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from fields(node[key], f"{path}[]")


ALL = dict(fields(SCHEMA))
RULES = [(path, rule) for path, node in ALL.items() for rule in node.get(VALIDATIONS, ())]


@pytest.mark.parametrize("name", crd.render_files())
def test_generated_files_are_current(name: str) -> None:
    assert (ROOT / name).read_text() == crd.render_files()[name], f"{name} is stale: run `{crd.COMMAND}`"


def test_check_notices_what_write_repairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crds").mkdir()
    root = ["--root", str(tmp_path)]
    assert crd.main(["--check", *root]) == 1
    assert crd.COMMAND in capsys.readouterr().err
    assert crd.main(["--write", *root]) == 0
    assert crd.main(["--check", *root]) == 0
    (tmp_path / "crds" / crd.FILE_NAME).write_text("edited by hand")
    assert crd.main(["--check", *root]) == 1


def test_outside_of_a_checkout_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check", "--root", str(tmp_path)]) == 2
    assert "no checkout of bidikv" in capsys.readouterr().err


def test_the_file_reads_back_as_the_crd() -> None:
    assert yaml.safe_load(crd.render_crd_file()) == CRD


def test_the_reference_tells_every_field_and_every_rule() -> None:
    sections = {}
    for section in reference.render_reference(SCHEMA).split("\n## ")[1:]:
        title, body = section.split("\n", 1)
        sections.update(dict.fromkeys(title.split(", "), body))
    for path, node in ALL.items():
        if path and "properties" in node and path != ".metadata":
            body = sections[path[1:]]
            for name, child in node["properties"].items():
                row = re.search(rf"^\| `{name}`(\*?) \|.*$", body, re.M)
                assert row is not None, f"{path}.{name}"
                assert bool(row[1]) == (name in node.get("required", ())), f"{path}.{name}"
                assert child["description"] in row[0].replace("\\|", "|"), f"{path}.{name}"
    quoted = "".join(sections.values())
    assert all(rule["message"] in quoted for path, rule in RULES if path)


def test_it_fits_client_side_apply() -> None:
    """`kubectl apply` copies an object into an annotation, which holds at most 256 KiB."""
    assert len(crd.render_crd_file()) < 128 * 1024


def test_kubectl_takes_the_short_name_for_one_kind_only() -> None:
    assert names.SHORT_NAME not in CRD["spec"]["names"]["categories"]


def test_columns_and_scale_point_at_fields_that_exist() -> None:
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    paths += VERSION["subresources"]["scale"].values()
    for path in paths:
        plain = re.sub(r"\[\?\(.*?\)\]", "[]", path)
        assert plain in ALL or plain == ".metadata.creationTimestamp", path


def test_every_field_is_described_in_sentences() -> None:
    for path, node in ALL.items():
        if "description" in node:
            assert re.search(r"[.)]$", node["description"]), f"{path}: {node['description']!r} is no sentence"


@pytest.mark.parametrize(("path", "rule"), RULES, ids=[f"{p or '.'}-{i}" for i, (p, _) in enumerate(RULES)])
def test_rules_name_a_field_and_the_remedy(path: str, rule: dict[str, str]) -> None:
    """The message starts with a field's name; it goes on with what to do."""
    subject = rule["message"].split()[0]
    known = {path.rsplit(".", 1)[-1], *ALL[path].get("properties", {}), "metadata.name"}
    assert subject in known, f"{path or '.'}: {rule['message']!r} starts with no field of {sorted(known)}"
    assert re.search(r"\b(use|set|choose|start|remove|raise)\b", rule["message"]), rule["message"]
    if "fieldPath" in rule:
        assert path + rule["fieldPath"] in ALL


def test_spec_has_no_defaults_and_every_list_says_how_it_merges() -> None:
    for path, node in ALL.items():
        assert "default" not in node, path
        assert (node.get("type") == "array") == ("x-kubernetes-list-type" in node), path


def test_status_says_what_kubernetes_tools_expect() -> None:
    condition = ALL[".status.conditions[]"]
    assert set(condition["properties"]) == {
        "type",
        "status",
        "observedGeneration",
        "lastTransitionTime",
        "reason",
        "message",
    }
    assert set(condition["required"]) == {"type", "status", "lastTransitionTime", "reason", "message"}
    assert ".status.observedGeneration" in ALL
