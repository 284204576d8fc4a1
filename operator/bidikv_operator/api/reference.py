"""The reference of the resource for people, ``crds/API.md``: one table per object, rendered from the CRD's schema.

Objects of one shape that stand in several places share a table. Rules are quoted as the API server says them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.api.schema import INT_OR_STRING, LIST_MAP_KEYS, LIST_TYPE, PRESERVE_UNKNOWN, VALIDATIONS

FILE_NAME: Final = "API.md"
_INTRODUCTION: Final = f"""# {names.KIND}, {names.API_VERSION}

Generated from the models in `operator/bidikv_operator/api/` by `make generate`; do not edit. A `*` marks a required
field. What an unset field means stands in its description and is decided by the operator, which writes nothing into the
resource. The same text is in `kubectl explain {names.PLURAL}.spec`.
"""


@dataclass
class _Section:
    """One object; ``paths`` are the places where it stands."""

    node: dict[str, Any]
    paths: list[str] = field(default_factory=list)


def render_reference(schema: dict[str, Any]) -> str:
    """Markdown of the schema's ``spec`` and ``status``; ``schema`` is a version's ``openAPIV3Schema``."""
    parts = [_INTRODUCTION]
    for top in ("spec", "status"):
        sections: dict[str, _Section] = {}
        for path, node in _iterate_objects(schema["properties"][top], top):
            key = repr({**node, "description": ""})
            sections.setdefault(key, _Section(node)).paths.append(path)
        parts += [_render_section(section) for section in sections.values()]
    return "\n".join(parts)


def _iterate_objects(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects with fields of their own, each before what it holds."""
    if node.get("type") == "array":
        yield from _iterate_objects(node["items"], f"{path}[]")
    elif "properties" in node:
        yield path, node
        for name, child in node["properties"].items():
            yield from _iterate_objects(child, f"{path}.{name}")


def _render_section(section: _Section) -> str:
    lines = [
        f"## {', '.join(section.paths)}",
        "",
        *([section.node["description"], ""] if len(section.paths) == 1 and "description" in section.node else []),
        "| Field | Type | Bounds | Meaning |",
        "| --- | --- | --- | --- |",
    ]
    required = section.node.get("required", ())
    rules = [rule["message"] for rule in section.node.get(VALIDATIONS, ())]
    for name, child in section.node["properties"].items():
        star = "*" if name in required else ""
        cells = (f"`{name}`{star}", _describe_type(child), _describe_bounds(child), child.get("description", ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if "properties" not in child:
            rules += [rule["message"] for rule in child.get(VALIDATIONS, ())]
    if rules:
        lines += ["", "Rules:", "", *(f"- {rule}." for rule in dict.fromkeys(rules))]
    return "\n".join(lines) + "\n"


def _describe_type(node: dict[str, Any]) -> str:
    if node.get(INT_OR_STRING):
        return "integer or string"
    if "enum" in node:
        return " or ".join(f"`{word}`" for word in node["enum"])
    kind = str(node["type"])
    if kind == "array":
        keys = node.get(LIST_MAP_KEYS)
        how = f"by {', '.join(keys)}" if keys else {"set": "distinct", "atomic": "ordered"}[node[LIST_TYPE]]
        return f"list of {_describe_type(node['items'])}, {how}"
    if "additionalProperties" in node:
        return f"map of {_describe_type(node['additionalProperties'])}"
    if kind == "object" and node.get(PRESERVE_UNKNOWN):
        return "any object"
    return kind


def _describe_bounds(node: dict[str, Any]) -> str:
    said = []
    if "minimum" in node:
        said.append(f"{node['minimum']} to {node['maximum']}")
    for least, most, what in (
        ("minLength", "maxLength", "characters"),
        ("minItems", "maxItems", "items"),
        ("minProperties", "maxProperties", "entries"),
    ):
        if least in node:
            said.append(f"{node[least]} to {node[most]} {what}")
        elif most in node:
            said.append(f"at most {node[most]} {what}")
    if "pattern" in node:
        said.append(f"`{node['pattern']}`")
    for inner in ("items", "additionalProperties"):
        bounds = _describe_bounds(node[inner]) if isinstance(node.get(inner), dict) else ""
        if bounds:
            said.append(f"each: {bounds}")
    return "; ".join(said)
