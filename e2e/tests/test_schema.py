"""What the API server accepts and refuses: one accepted and one refused resource per constraint.

Bounds, requirements, types, enums and patterns are walked from the CRD itself (``schema_walk.py``), so that a new field
is tested without a new row. What only words can say, CEL rules and list keys, stands in tables (``schema_rows.py``); a
test fails when the CRD holds a rule that no row refuses or a pattern without samples.

Everything is a server-side dry run in one kubectl call: nothing is stored, and a running operator notices nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from bidikv_operator import names
from bidikv_operator.api.schema import VALIDATIONS
from bidikv_operator.api.v1alpha1 import MAX_NAME_LENGTH
from bidikv_operator.validate import Rejected, validate
from e2e.kubectl import Kubectl, KubectlError, Manifest
from e2e.tests.schema_rows import ACCEPTED, BASE, BESIDE, ONLY_REFUSED, REFUSED, SAMPLES, changed
from e2e.tests.schema_walk import FIELDS, SCHEMA, Case, base_of, make_cases, shown


def worded_cases() -> Iterator[Case]:
    for title, changes, at, sentence in REFUSED:
        yield Case(title, changed(base_of(next(iter(changes))), changes), shown(at), (sentence,))
    for title, changes in ACCEPTED:
        yield Case(title, changed(base_of(next(iter(changes))), changes))


CASES = [*make_cases(), *worded_cases()]
IDS = [f"{'refused' if case.says else 'accepted'}: {case.title}" for case in CASES]


def manifest(name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}


# --- the tests --------------------------------------------------------------------------------------------------------


def test_every_rule_is_refused_by_a_row() -> None:
    """Bounds, enums and patterns are walked; rules are words, which only a row can break."""
    refused = {(shown(at), sentence) for _, _, at, sentence in REFUSED}
    for path, node in [("", SCHEMA["properties"]["spec"]), *FIELDS.items()]:
        for rule in node.get(VALIDATIONS, ()):
            where = shown(path) + rule.get("fieldPath", "")
            said = [sentence for found, sentence in refused if found == where and rule["message"].startswith(sentence)]
            assert said, f"no row refuses the rule of {where}: {rule['message']}"


def test_every_sample_belongs_to_a_pattern_and_every_exception_to_a_field() -> None:
    assert {node["pattern"] for node in FIELDS.values() if "pattern" in node} == set(SAMPLES)
    assert {path for path, _ in (*BESIDE, *ONLY_REFUSED)} <= set(FIELDS)


OF_THE_API_SERVER = re.compile(r"podTemplate\.metadata\..* passes ")
"""Titles of cases that the operator leaves to the API server: sizes of what it copies into pods."""


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_operator_agrees(case: Case) -> None:
    """It must not rely on the schema: a resource may have been stored under an older CRD."""
    resource = manifest("a", case.spec)
    resource["metadata"] |= {"namespace": "team", "uid": "1"}
    checked = validate(resource, runtime_image="registry.example.com/runtime:v1")
    refused = bool(case.says) and not OF_THE_API_SERVER.search(case.title)
    assert isinstance(checked, Rejected) == refused, checked


@pytest.fixture(scope="module")
def verdicts(cluster: Kubectl, crd: None) -> dict[str, str]:
    """What the API server says about each case, by name; nothing about the accepted ones."""
    items = [manifest(f"case-{number}", case.spec) for number, case in enumerate(CASES)]
    argv = cluster.within("default").argv("create", "--dry-run=server", "--validate=ignore", "-o", "name", "-f", "-")
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=300)
    verdicts = {line.rpartition("/")[2]: "" for line in done.stdout.splitlines()}
    verdicts |= dict(re.findall(r'"(case-\d+)" is invalid: (.*)', done.stderr))
    assert len(verdicts) == len(CASES), f"the API server did not answer about every case:\n{done.stderr}"
    return verdicts


@pytest.mark.cluster
@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_api_server(verdicts: dict[str, str], number: int) -> None:
    case, verdict = CASES[number], verdicts[f"case-{number}"]
    if not case.says:
        assert verdict == ""
        return
    assert case.at in verdict, f"names no {case.at}: {verdict or 'accepted'}"
    for words in case.says:
        assert words in verdict, f"does not say {words!r}: {verdict}"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a" * (MAX_NAME_LENGTH + 1), f"metadata.name is too long: use at most {MAX_NAME_LENGTH} characters"),
        ("qwen3.5", "metadata.name must start with a letter"),
        ("3-qwen", "metadata.name must start with a letter"),
    ],
)
def test_names_that_no_service_can_have_are_refused(cluster: Kubectl, crd: None, name: str, sentence: str) -> None:
    with pytest.raises(KubectlError, match=re.escape(sentence)):
        create(cluster, manifest(name, BASE))


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["a", "qwen3-32b", "a" * MAX_NAME_LENGTH])
def test_names_that_services_can_have_are_accepted(cluster: Kubectl, crd: None, name: str) -> None:
    assert name in create(cluster, manifest(name, BASE))


@pytest.mark.cluster
@pytest.mark.parametrize("path", ["bogus", "prefill.bogus", "prefill.podTemplate.nodeSelector", "kvReuse.bogus"])
def test_misspelt_fields_are_refused(cluster: Kubectl, crd: None, path: str) -> None:
    with pytest.raises(KubectlError, match=re.escape(f'unknown field "spec.{path}"')):
        create(cluster, manifest("a", changed(BASE, {path: {}})))


def create(cluster: Kubectl, resource: Manifest) -> str:
    """``kubectl create`` as users run it (strict about unknown fields), as a dry run."""
    arguments = ("create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-")
    return cluster.within("default").run(*arguments, stdin=json.dumps(resource))
