"""Every field of the CRD's spec, and the resources that try its bounds, type, requirements, enum and pattern.

Walked from the CRD itself, so that a new field is tested without a new row: the value at the bound must pass and the
next one must not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bidikv_operator.api.crd import build_crd
from bidikv_operator.api.schema import INT_OR_STRING
from e2e.kubectl import Manifest
from e2e.tests.schema_rows import BASE, BASES, BESIDE, ONLY_REFUSED, REMOVED, SAMPLES, changed

SCHEMA: Final[dict[str, Any]] = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
MAP_KEY: Final = "key0"
"""Of every map in the bases."""


@dataclass(frozen=True)
class Case:
    """One resource; refused when ``says`` has words, which the API server must then say about ``at``."""

    title: str
    spec: Manifest
    at: str = ""
    says: tuple[str, ...] = field(default=())


def walk(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted path (list items as ``0``, values of maps as ``key0``) and schema of everything below ``node``."""
    children = dict(node.get("properties", {}))
    if "items" in node:
        children["0"] = node["items"]
    if isinstance(node.get("additionalProperties"), dict):
        children[MAP_KEY] = node["additionalProperties"]
    for name, child in children.items():
        below = f"{path}.{name}" if path else name
        yield below, child
        yield from walk(child, below)


FIELDS: Final = dict(walk(SCHEMA["properties"]["spec"]))


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
    """``value``, a string, list or map, with ``size`` characters or (distinct, where they must be) entries."""
    if isinstance(value, str):
        return value + "a" * (size - len(value)) if size >= len(value) else value[:size]
    if isinstance(value, dict):
        return {f"key{i}": "v" for i in range(size)}
    if isinstance(value[0], dict):
        return [{**value[0], **({"name": f"{value[0]['name']}{i}"} if "name" in value[0] else {})} for i in range(size)]
    return [f"{value[0]}{i}" for i in range(size)]


def shown(path: str) -> str:
    """The path as the API server writes it: ``spec.prefill.env[0].name``."""
    return re.sub(r"\.(\d+)", r"[\1]", f"spec.{path}".rstrip("."))


def make_cases() -> Iterator[Case]:
    """Of each field: the values at its bounds, of its enum and pattern pass, others do not; a wrong type, or a missing
    value, does not."""
    for path, node in FIELDS.items():
        yield from _Field(path, node).make_cases()
    for child in SCHEMA["properties"]["spec"]["required"]:
        removed = changed(BASE, {child: REMOVED})
        yield Case(f"spec.{child} is missing", removed, f"spec.{child}", ("Required value",))


class _Field:
    def __init__(self, path: str, node: dict[str, Any]) -> None:
        self.path, self.node = path, node
        self.at = shown(path)
        self.base = base_of(path)
        self.value = look_up(self.base, path)

    def accept(self, title: str, value: Any) -> Case:
        key = (self.path, value if isinstance(value, str | int) else None)
        spec = changed(self.base, {self.path: value} | BESIDE.get(key, {}))
        says = (ONLY_REFUSED[key],) if key in ONLY_REFUSED else ()
        return Case(f"{self.at} {title}", spec, self.at, says)

    def refuse(self, title: str, value: Any, *says: str) -> Case:
        return Case(f"{self.at} {title}", changed(self.base, {self.path: value}), self.at, says)

    def make_cases(self) -> Iterator[Case]:
        node = self.node
        is_either = node.get(INT_OR_STRING) is True
        wrong = {"string": 1, "integer": "one", "boolean": "yes", "array": "one", "object": "one"}
        yield self.refuse("has another type", ["one"] if is_either else wrong[node["type"]], "must be of type")
        if "enum" in node:
            for word in node["enum"]:
                yield self.accept(f"is {word}", word)
            yield self.refuse("is an unknown word", "Unknown", "Unsupported value")
        if "minimum" in node:
            yield self.accept("is the least", node["minimum"])
            yield self.refuse("is too small", node["minimum"] - 1, "greater than or equal to")
            yield self.accept("is the greatest", node["maximum"])
            yield self.refuse("is too great", node["maximum"] + 1, "less than or equal to")
        if "pattern" in node:
            good, bad = SAMPLES[node["pattern"]]
            for word in good:
                yield self.accept(f"is {word!r}", word)
            for word in bad:
                yield self.refuse(f"is {word!r}", word, "should match")
        yield from self._make_size_cases(SAMPLES[node["pattern"]][0] if is_either else (self.value,))
        for child in node.get("required", ()):
            removed = changed(self.base, {f"{self.path}.{child}": REMOVED})
            yield Case(f"{self.at}.{child} is missing", removed, f"{self.at}.{child}", ("Required value",))

    def _make_size_cases(self, values: tuple[Any, ...]) -> Iterator[Case]:
        node, value = self.node, values[0]
        pattern = node.get("pattern", "")
        if "minLength" in node:
            yield self.accept("is shortest", stretched(value, node["minLength"]))
            yield self.refuse("is too short", stretched(value, node["minLength"] - 1), "at least 1 chars long")
        if "minProperties" in node:
            yield self.accept("has least entries", stretched(value, node["minProperties"]))
            yield self.refuse(
                "has too few entries", stretched(value, node["minProperties"] - 1), "at least 1 properties"
            )
        for keyword, says in (("maxLength", "Too long"), ("maxItems", "Too many"), ("maxProperties", "Too many")):
            if keyword not in node:
                continue
            longest = stretched(value, node[keyword])
            if pattern and not re.search(pattern, longest):
                # A sample of this length is among the accepted ones instead.
                longest = next(word for word in SAMPLES[pattern][0] if len(word) == node[keyword])
            yield self.accept(f"reaches {keyword}", longest)
            yield self.refuse(f"passes {keyword}", stretched(value, node[keyword] + 1), says)
