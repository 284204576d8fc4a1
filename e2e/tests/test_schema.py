"""What the API server accepts and refuses: one accepted and one refused resource per constraint.

Bounds, requirements and types are walked from the CRD itself, so that a new field is tested without a new row: the
value at the bound must pass and the next one must not. What only words can say (patterns, enums, CEL rules, list keys)
stands in tables; a test fails when the CRD holds a pattern or rule that no row refuses.

Everything is a server-side dry run in one kubectl call: nothing is stored, and a running operator notices nothing.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.api.crd import build_crd
from bidikv_operator.api.schema import VALIDATIONS
from bidikv_operator.api.v1alpha1 import MAX_NAME_LENGTH, OWNED_FLAGS, BidiKVInference
from e2e.kubectl import Kubectl, KubectlError, Manifest

SCHEMA: dict[str, Any] = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
REMOVED = object()

BASE: Manifest = {
    "model": {"source": {"path": "/models/tiny"}, "servedName": "tiny", "maxLength": 4096},
    "image": "vllm/vllm-openai:v0.32.0",
    "imagePullSecrets": ["registry"],
    "fabric": {"type": "TCP"},
    "kvReuse": {"mode": "Bidirectional"},
    "prefill": {
        "replicas": 2,
        "tensorParallelSize": 2,
        "extraArgs": ["--dtype", "float32"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {"nodeSelector": {"pool": "gpu"}, "containers": [{"name": "engine", "resources": {}}]},
        },
    },
    "decode": {
        "replicas": 2,
        "gpusPerPod": 1,
        "extraArgs": ["--dtype", "float32"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "podTemplate": {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}, "spec": {}},
    },
    "router": {
        "replicas": 2,
        "podTemplate": {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}, "spec": {}},
    },
}
"""A resource that sets nearly everything; ``BASES`` hold the rest, which excludes some of it."""


def changed(base: Manifest, changes: dict[str, Any]) -> Manifest:
    """A copy of the spec ``base`` with values set or removed at dotted paths (``prefill.env.0.name``)."""
    spec = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = spec
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is REMOVED:
            del node[last]
        elif isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    return spec


HUB = {"source": {"huggingFace": {"repository": "Qwen/Qwen3-32B", "revision": "main", "tokenSecretName": "hub"}}}
CLAIM = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "qwen3"}}}
BASES = (
    BASE,
    changed(BASE, {"model": HUB, "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge"}}),
    changed(BASE, {"model": CLAIM, "fabric": {"type": "EFA", "interfacesPerPod": 4}}),
    changed(BASE, {"prefill": {"gpusPerPod": 1}, "decode": {"tensorParallelSize": 1}}),
)


@dataclass(frozen=True)
class Case:
    """One resource; refused when ``says`` has words, which the API server must then say about ``at``."""

    title: str
    spec: Manifest
    at: str = ""
    says: tuple[str, ...] = field(default=())


# --- walked from the schema -------------------------------------------------------------------------------------------


def constrained(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted path (list items as ``0``) and schema of everything below ``node``."""
    for name, child in node.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, child
        yield from constrained(child, below)
    if "items" in node:
        yield f"{path}.0", node["items"]
        yield from constrained(node["items"], f"{path}.0")


FIELDS = dict(constrained(SCHEMA["properties"]["spec"]))


def look_up(spec: Manifest, path: str) -> Any:
    """The value at a dotted path, or REMOVED."""
    node: Any = spec
    for part in path.split("."):
        try:
            node = node[int(part)] if isinstance(node, list) else node[part]
        except (KeyError, IndexError):
            return REMOVED
    return node


def base_of(path: str) -> Manifest:
    """The first base that holds the field."""
    return next(base for base in BASES if look_up(base, path) is not REMOVED)


def stretched(value: Any, size: int) -> Any:
    """``value``, a string, list or map, with ``size`` characters or (distinct) entries."""
    if isinstance(value, str):
        return (value[:1] + "a" * size)[:size]
    if isinstance(value, dict):
        return {f"key{i}": "v" for i in range(size)}
    if isinstance(value[0], dict):
        return [{**value[0], "name": f"{value[0]['name']}{i}"} for i in range(size)]
    return [f"{value[0]}{i}" for i in range(size)]


def shown(path: str) -> str:
    """The path as the API server writes it: ``spec.prefill.env[0].name``."""
    return re.sub(r"\.(\d+)", r"[\1]", f"spec.{path}")


def walked_cases() -> Iterator[Case]:
    """Of each field: the values at its bounds pass, those beyond do not; a wrong type, or a missing value, does not."""
    for path, node in FIELDS.items():
        base, at = base_of(path), shown(path)
        value = look_up(base, path)

        def case(title: str, value: Any, *says: str, base: Manifest = base, path: str = path, at: str = at) -> Case:
            return Case(f"{at} {title}", changed(base, {path: value}), at, says)

        wrong = {"string": 1, "integer": "one", "array": "one", "object": "one"}[node["type"]]
        yield case("has another type", wrong, "must be of type")
        if "minimum" in node:
            yield case("is the least", node["minimum"])
            yield case("is too small", node["minimum"] - 1, "greater than or equal to")
            yield case("is the greatest", node["maximum"])
            yield case("is too great", node["maximum"] + 1, "less than or equal to")
        if "minLength" in node:
            yield case("is shortest", stretched(value, node["minLength"]))
            yield case("is too short", stretched(value, node["minLength"] - 1), "at least 1 chars long")
        for keyword, says in (("maxLength", "Too long"), ("maxItems", "Too many"), ("maxProperties", "Too many")):
            if keyword in node:
                yield case(f"reaches {keyword}", stretched(value, node[keyword]))
                yield case(f"passes {keyword}", stretched(value, node[keyword] + 1), says)
        for child in node.get("required", ()):
            removed = changed(base, {f"{path}.{child}": REMOVED})
            yield Case(f"{at}.{child} is missing", removed, f"{at}.{child}", ("Required value",))
    for child in SCHEMA["properties"]["spec"]["required"]:
        removed = changed(BASE, {child: REMOVED})
        yield Case(f"spec.{child} is missing", removed, f"spec.{child}", ("Required value",))


# --- in words ---------------------------------------------------------------------------------------------------------

EFA = {"fabric.type": "EFA"}
SOURCE = "source needs exactly one of huggingFace, persistentVolumeClaim and path: set one, remove the others"
ABSOLUTE = "path must be absolute: start it with '/'"
INSIDE = "path must be relative and stay inside the volume: remove the leading '/' and every '..'"
REFERENCE = "image must be an image reference such as vllm/vllm-openai:v0.32.0: remove white space and 'https://'"
INTERFACES = "type EFA needs instanceType or interfacesPerPod: set one, it says how many EFA interfaces a pod gets"
EFA_INSTANCE = "instanceType belongs to type EFA: remove it, or set type to EFA"
EFA_INTERFACES = "interfacesPerPod belongs to type EFA: remove it, or set type to EFA"
GPUS = "gpusPerPod is smaller than tensorParallelSize: raise it, or leave it out to get one GPU per rank"
FLAG = "extraArgs names a flag that belongs to the operator: remove it and use the resource's own fields"
PATTERN = "should match"
ENUM = "Unsupported value"

CLAIM_PATH = "model.source.persistentVolumeClaim.path"
SECRET = "model.source.huggingFace.tokenSecretName"
CLAIM_NAME = "model.source.persistentVolumeClaim.claimName"

# title, changes, field, sentence; the first base that has the first changed field is changed.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("no source", {"model.source": {}}, "model.source", SOURCE),
    ("two sources", {"model.source.path": "/m", "model.source.huggingFace.repository": "a/b"}, "model.source", SOURCE),
    ("relative path", {"model.source.path": "models"}, "model.source.path", ABSOLUTE),
    ("absolute path in a volume", {CLAIM_PATH: "/qwen3"}, CLAIM_PATH, INSIDE),
    ("path out of a volume", {CLAIM_PATH: "a/../../b"}, CLAIM_PATH, INSIDE),
    ("image with a scheme", {"image": "https://example.com/vllm:1"}, "image", REFERENCE),
    ("image with white space", {"image": "vllm/vllm-openai:v0.32.0\n"}, "image", REFERENCE),
    ("EFA without figures", EFA, "fabric", INTERFACES),
    ("TCP with an instance type", {"fabric.instanceType": "p5.48xlarge", "fabric.type": "TCP"}, "fabric.instanceType",
     EFA_INSTANCE),
    ("TCP with interfaces", {"fabric.interfacesPerPod": 4, "fabric.type": "TCP"}, "fabric.interfacesPerPod",
     EFA_INTERFACES),
    ("fewer GPUs than ranks", {"prefill.tensorParallelSize": 4, "prefill.gpusPerPod": 2}, "prefill.gpusPerPod", GPUS),
    ("fewer GPUs than ranks in decode", {"decode.tensorParallelSize": 4, "decode.gpusPerPod": 2}, "decode.gpusPerPod",
     GPUS),
    *(("flag " + flag, {"prefill.extraArgs": [flag]}, "prefill.extraArgs", FLAG) for flag in OWNED_FLAGS),
    ("flag with its value", {"decode.extraArgs": ["--port=80"]}, "decode.extraArgs", FLAG),
    ("flag with underscores", {"decode.extraArgs": ["--max_model_len", "1"]}, "decode.extraArgs", FLAG),
    ("shortened flag", {"decode.extraArgs": ["--max-model", "1"]}, "decode.extraArgs", FLAG),
    ("key of a JSON flag", {"decode.extraArgs": ["--kv-transfer-config.kv_role", "x"]}, "decode.extraArgs", FLAG),
    ("unknown fabric", {"fabric.type": "RDMA"}, "fabric.type", ENUM),
    ("unknown instance type", {"fabric.instanceType": "m5.large"}, "fabric.instanceType", ENUM),
    ("unknown mode", {"kvReuse.mode": "Both"}, "kvReuse.mode", ENUM),
    ("Secret's name in capitals", {SECRET: "Hub"}, SECRET, PATTERN),
    ("claim's name with an empty label", {CLAIM_NAME: "a..b"}, CLAIM_NAME, PATTERN),
    ("pull secret's name with a space", {"imagePullSecrets": ["a b"]}, "imagePullSecrets.0", PATTERN),
    ("variable with a digit first", {"prefill.env": [{"name": "1A", "value": ""}]}, "prefill.env.0.name", PATTERN),
    ("variable with a dash", {"decode.env": [{"name": "A-B", "value": ""}]}, "decode.env.0.name", PATTERN),
    ("pull secret given twice", {"imagePullSecrets": ["a", "a"]}, "imagePullSecrets.1", "Duplicate value"),
    ("variable given twice", {"prefill.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
     "prefill.env.1", "Duplicate value"),
]  # fmt: skip
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (
        "only what is required",
        dict.fromkeys(("imagePullSecrets", "kvReuse", "prefill", "decode", "router"), REMOVED),
    ),
    ("model on the hub", {"model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-32B"}}}}),
    ("model on a volume", {CLAIM_PATH: "a/b..c/..d"}),
    ("image by digest", {"image": f"registry.example.com:5000/a/b@sha256:{'0' * 64}"}),
    *(("instance type " + str(kind), {"fabric.instanceType": kind}) for kind in FIELDS["fabric.instanceType"]["enum"]),
    ("EFA with both figures", {"fabric.instanceType": "p5en.48xlarge", "fabric.interfacesPerPod": 8}),
    *(("mode " + str(mode), {"kvReuse.mode": mode}) for mode in FIELDS["kvReuse.mode"]["enum"]),
    ("as many GPUs as ranks", {"prefill.tensorParallelSize": 4, "prefill.gpusPerPod": 4}),
    ("more GPUs than ranks", {"prefill.tensorParallelSize": 2, "prefill.gpusPerPod": 4}),
    ("engine on CPUs", {"prefill.tensorParallelSize": 4, "prefill.gpusPerPod": 0}),
    ("no replica", {"decode.replicas": 0, "prefill.replicas": 0, "router.replicas": 0}),
    ("flags that only look like the operator's", {"prefill.extraArgs": ["--model-impl", "--block-size", "32", "-1"]}),
    ("flag's name as a value", {"prefill.extraArgs": ["--chat-template=--port", "port", "--", "-"]}),
    ("Secret's name with dots", {SECRET: "hub.example-1.com"}),
    ("claim's name with dots", {CLAIM_NAME: "a.b-1"}),
    ("pull secret's name with dots", {"imagePullSecrets": ["a.b-1"]}),
    ("two variables", {"prefill.env": [{"name": "_A", "value": "1"}, {"name": "B2", "value": ""}]}),
    ("variable in decode", {"decode.env": [{"name": "a_B", "value": ""}]}),
    ("anything in a pod's spec", {"prefill.podTemplate": {"spec": {"x": [{"y": 1.5}], "tolerations": [{}]}}}),
]


def worded_cases() -> Iterator[Case]:
    for title, changes, at, sentence in REFUSED:
        yield Case(title, changed(base_of_changes(changes), changes), shown(at), (sentence,))
    for title, changes in ACCEPTED:
        yield Case(title, changed(base_of_changes(changes), changes))


def base_of_changes(changes: dict[str, Any]) -> Manifest:
    return base_of(next(iter(changes)))


CASES = [*walked_cases(), *worded_cases()]
IDS = [f"{'refused' if case.says else 'accepted'}: {case.title}" for case in CASES]


def manifest(name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}


# --- the tests --------------------------------------------------------------------------------------------------------


def test_every_pattern_enum_and_rule_is_refused_by_a_row() -> None:
    refused = {(shown(at), sentence) for _, _, at, sentence in REFUSED}
    for path, node in FIELDS.items():
        at = shown(path)
        assert "pattern" not in node or (at, PATTERN) in refused, f"no row refuses the pattern of {at}"
        assert "enum" not in node or (at, ENUM) in refused, f"no row refuses the enum of {at}"
        for rule in node.get(VALIDATIONS, ()):
            where = at + rule.get("fieldPath", "")
            said = [sentence for found, sentence in refused if found == where and rule["message"].startswith(sentence)]
            assert said, f"no row refuses the rule of {where}: {rule['message']}"


@pytest.mark.parametrize("case", [c for c in CASES if not c.says], ids=lambda c: c.title)
def test_the_models_read_what_the_schema_accepts(case: Case) -> None:
    BidiKVInference.model_validate(manifest("a", case.spec))


@pytest.fixture(scope="module")
def verdicts(cluster: Kubectl, crd: None) -> dict[str, str]:
    """What the API server says about each case, by name; nothing about the accepted ones."""
    items = [manifest(f"case-{number}", case.spec) for number, case in enumerate(CASES)]
    argv = cluster.within("default").argv("create", "--dry-run=server", "--validate=ignore", "-o", "name", "-f", "-")
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=120)
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
