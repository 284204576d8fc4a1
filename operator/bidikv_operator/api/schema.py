"""pydantic's JSON schema -> the structural OpenAPI v3 schema of a CustomResourceDefinition.

The API server refuses most of what pydantic emits (``$ref``, ``anyOf`` with null, ``const``, ``additionalProperties:
false``...) and silently drops or materialises some of the rest. So this is a strict converter: every keyword must be on
the list of its type, and everything else raises with the field's path and the remedy. It also holds the conventions of
the API, which no type checker sees:

- every field has a description; every list says how it merges (``x-kubernetes-list-type``);
- every string, list and map has an upper bound and every integer both bounds: the API server prices CEL rules by them
  and refuses a CRD whose rules could be too expensive;
- no default unless the caller names it, never one inside a list item: the API server writes defaults into the stored
  object, and GitOps tools compare lists as a whole, so such an item differs from its source for ever.

Source of the dialect: "Extend the Kubernetes API with CustomResourceDefinitions", section "Specifying a structural
schema" of the Kubernetes documentation.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

Node = dict[str, Any]
"""One JSON schema object."""

VALIDATIONS: Final = "x-kubernetes-validations"
LIST_TYPE: Final = "x-kubernetes-list-type"
LIST_MAP_KEYS: Final = "x-kubernetes-list-map-keys"
PRESERVE_UNKNOWN: Final = "x-kubernetes-preserve-unknown-fields"
MAP_TYPE: Final = "x-kubernetes-map-type"
INT_OR_STRING: Final = "x-kubernetes-int-or-string"

_ANY_TYPE: Final = ("description", "type", "default", "enum", VALIDATIONS)
_KEYWORDS: Final[dict[str, tuple[str, ...]]] = {
    "string": ("format", "minLength", "maxLength", "pattern"),
    "integer": ("format", "minimum", "maximum"),
    "boolean": (),
    "array": (LIST_TYPE, LIST_MAP_KEYS, "minItems", "maxItems", "items"),
    "object": (
        MAP_TYPE,
        PRESERVE_UNKNOWN,
        "minProperties",
        "maxProperties",
        "required",
        "properties",
        "additionalProperties",
    ),
    INT_OR_STRING: (INT_OR_STRING, "minimum", "maximum", "maxLength", "pattern"),
}
"""By type; a node with ``x-kubernetes-int-or-string`` has none, and its bounds hold for the kind of value they fit."""
_REMEDIES: Final = {
    "exclusiveMinimum": "use ge instead of gt",
    "exclusiveMaximum": "use le instead of lt",
    "multipleOf": "use a CEL rule",
    "uniqueItems": f"use a list with {LIST_TYPE}: set instead of a Python set",
    "prefixItems": "use an object instead of a tuple",
    "anyOf": "use optional sub-objects and a CEL rule `exactly one of`; only `X | None` may be a union",
    "oneOf": "use optional sub-objects and a CEL rule `exactly one of`",
    "allOf": "write the constraints on the field itself",
    "discriminator": "use optional sub-objects and a CEL rule `exactly one of`",
    "patternProperties": "use a bounded map or a list with list-map keys",
    "propertyNames": "use a list with list-map keys, or a CEL rule over the map's keys",
    "examples": "write the example into the description",
}
_INTEGER_RANGES: Final = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**53), 2**53)}
"""The API server keeps bounds as float64: a maximum of 2**63 - 1 overflows there and refuses every value."""
_STRING_FORMATS: Final = frozenset({"date-time"})
"""Formats that the API server really checks and that bound the string's length for CEL."""
_LIST_TYPES: Final = frozenset({"atomic", "set", "map"})
_VALIDATION_KEYWORDS: Final = frozenset({"rule", "message", "fieldPath", "reason"})
_SCALARS: Final = frozenset({"string", "integer", "boolean"})
_NOT_RE2: Final = re.compile(r"\(\?(?:[=!]|<[=!]|>)|\\[1-9]|[*+?}]\+")
"""Look-around, atomic groups, back-references and possessive quantifiers: Go's RE2 has none of them."""


class SchemaError(ValueError):
    """A model that has no faithful structural schema; the message names the field and the remedy."""


def build_open_api_schema(model: type[BaseModel], *, allowed_defaults: Iterable[str] = ()) -> Node:
    """The structural schema of ``model``, for ``versions[].schema.openAPIV3Schema``.

    ``allowed_defaults`` are paths such as ``spec.router.replicas`` whose defaults are kept; each must exist. Raises
    ``SchemaError`` for everything that the API server would refuse, drop or treat differently from pydantic.
    """
    return convert_json_schema(model.model_json_schema(by_alias=True), allowed_defaults=allowed_defaults)


def convert_json_schema(document: Mapping[str, Any], *, allowed_defaults: Iterable[str] = ()) -> Node:
    """Convert a JSON schema document as pydantic writes it (``$defs`` at the top); see ``build_open_api_schema``."""
    root = copy.deepcopy(dict(document))
    converter = _Converter(definitions=root.pop("$defs", {}), allowed_defaults=frozenset(allowed_defaults))
    schema = converter.convert(root, _Place(path="", described=True))
    unused = converter.allowed_defaults - converter.used_defaults
    if unused:
        raise SchemaError(f"allowed_defaults names fields without a default, remove them: {', '.join(sorted(unused))}")
    return schema


@dataclass(frozen=True)
class _Place:
    """Where in the document the walk is."""

    path: str
    stack: tuple[str, ...] = ()
    """Definitions being inlined: meeting one again is a recursion."""
    in_list: bool = False
    described: bool = False
    """Whether this node must carry a description (list items and map values need none)."""

    @property
    def name(self) -> str:
        return self.path or "the root"

    def field(self, name: str) -> _Place:
        path = f"{self.path}.{name}" if self.path else name
        return _Place(path=path, stack=self.stack, in_list=self.in_list, described=True)

    def items(self) -> _Place:
        return _Place(path=f"{self.path}[]", stack=self.stack, in_list=True)

    def values(self) -> _Place:
        return _Place(path=f"{self.path}{{}}", stack=self.stack, in_list=self.in_list)

    def inside(self, definition: str) -> _Place:
        return _Place(path=self.path, stack=(*self.stack, definition), in_list=self.in_list, described=self.described)


@dataclass
class _Converter:
    definitions: Mapping[str, Node]
    allowed_defaults: frozenset[str]
    used_defaults: set[str] = field(default_factory=set)

    def convert(self, node: Node, place: _Place) -> Node:
        node, place = self._flatten(node, place)
        if place.described and not str(node.get("description", "")).strip():
            raise SchemaError(f"{place.name}: has no description; `kubectl explain` would show nothing")
        node.pop("title", None)
        if "const" in node:
            node["enum"] = [node.pop("const")]
        kind = self._check_keywords(node, place)
        self._convert_default(node, place)
        self._check_validations(node, place)
        match kind:
            case "string":
                self._check_string(node, place)
            case "integer":
                self._convert_integer(node, place)
            case "array":
                self._convert_array(node, place)
            case "object":
                self._convert_object(node, place)
            case _ if kind == INT_OR_STRING:
                self._check_int_or_string(node, place)
        order = (*_ANY_TYPE, *_KEYWORDS[kind])
        return {key: node[key] for key in order if key in node}

    def _flatten(self, node: Node, place: _Place) -> tuple[Node, _Place]:
        """Resolve ``$ref`` and ``X | None`` until a plain node is left; what stands beside them wins."""
        node = dict(node)
        while True:
            if "$ref" in node:
                name = str(node.pop("$ref")).removeprefix("#/$defs/")
                if name in place.stack:
                    raise SchemaError(f"{place.name}: {name} contains itself; a structural schema cannot recurse")
                if name not in self.definitions:
                    raise SchemaError(f"{place.name}: reference to unknown definition {name}")
                node, place = _merge(self.definitions[name], node), place.inside(name)
            elif "anyOf" in node:
                choices = [choice for choice in node["anyOf"] if choice != {"type": "null"}]
                if len(choices) != 1 or len(node["anyOf"]) != 2:
                    raise SchemaError(f"{place.name}: anyOf is not structural; {_REMEDIES['anyOf']}")
                if "default" not in node:
                    raise SchemaError(f"{place.name}: required but may be null; give it the default None")
                node.pop("anyOf")
                if node["default"] is None:
                    node.pop("default")
                node = _merge(choices[0], node)
            else:
                return copy.deepcopy(node), place

    def _check_keywords(self, node: Node, place: _Place) -> str:
        if node.get("additionalProperties") is False:  # extra="forbid": pruning and strict field validation do this
            node.pop("additionalProperties")
        kind = node.get("type", INT_OR_STRING if node.get(INT_OR_STRING) is True else None)
        for keyword in node:
            if keyword in _REMEDIES:
                raise SchemaError(f"{place.name}: {keyword} is not structural; {_REMEDIES[keyword]}")
        if kind == "number":
            raise SchemaError(f"{place.name}: floats are banned from the API; use an integer with the unit in its name")
        if kind not in _KEYWORDS:
            raise SchemaError(f"{place.name}: type {kind!r} is not structural; give it one concrete type")
        for keyword in node:
            if keyword not in _ANY_TYPE and keyword not in _KEYWORDS[kind]:
                raise SchemaError(f"{place.name}: keyword {keyword} is unknown for type {kind}; remove it")
        if "enum" in node and not (kind == "string" and all(isinstance(value, str) for value in node["enum"])):
            raise SchemaError(f"{place.name}: enums are strings in this API; use words that can grow")
        return str(kind)

    def _convert_default(self, node: Node, place: _Place) -> None:
        if "default" not in node:
            return
        if place.in_list:
            raise SchemaError(
                f"{place.name}: a default inside a list item shows as a difference for ever; set it in code"
            )
        if place.path not in self.allowed_defaults:
            raise SchemaError(f"{place.name}: defaults are written into stored objects; use None and set it in code")
        self.used_defaults.add(place.path)

    def _check_validations(self, node: Node, place: _Place) -> None:
        for validation in node.get(VALIDATIONS, ()):
            unknown = set(validation) - _VALIDATION_KEYWORDS
            if unknown:
                raise SchemaError(f"{place.name}: CEL rule has unknown keys {sorted(unknown)}")
            if not validation.get("rule") or not validation.get("message"):
                raise SchemaError(f"{place.name}: a CEL rule needs `rule` and `message`")

    def _check_string(self, node: Node, place: _Place) -> None:
        if "format" in node and node["format"] not in _STRING_FORMATS:
            raise SchemaError(f"{place.name}: format {node['format']} is not known to be checked; use a pattern")
        if "enum" not in node and "format" not in node and "maxLength" not in node:
            raise SchemaError(f"{place.name}: string without max_length; CEL rules over it have no bounded cost")
        if "pattern" in node and _NOT_RE2.search(node["pattern"]):
            raise SchemaError(f"{place.name}: pattern uses what Go's regular expressions lack; use a CEL rule")

    def _convert_integer(self, node: Node, place: _Place) -> None:
        wanted = node.setdefault("format", "int32")
        if wanted not in _INTEGER_RANGES:
            raise SchemaError(f"{place.name}: format {wanted} of an integer is neither int32 nor int64")
        lowest, highest = _INTEGER_RANGES[wanted]
        if "minimum" not in node or "maximum" not in node:
            raise SchemaError(f"{place.name}: integer without both bounds; set ge and le")
        if not lowest <= node["minimum"] <= node["maximum"] <= highest:
            raise SchemaError(
                f"{place.name}: bounds {node['minimum']}..{node['maximum']} do not fit {wanted} as a float64"
            )

    def _check_int_or_string(self, node: Node, place: _Place) -> None:
        missing = [keyword for keyword in ("minimum", "maximum", "maxLength", "pattern") if keyword not in node]
        if missing:
            raise SchemaError(
                f"{place.name}: {INT_OR_STRING} without {missing[0]}; bound both its numbers and its words"
            )
        self._check_string(node, place)

    def _convert_array(self, node: Node, place: _Place) -> None:
        if "maxItems" not in node:
            raise SchemaError(f"{place.name}: list without max_length; CEL rules over it have no bounded cost")
        if not node.get("items"):
            raise SchemaError(f"{place.name}: list without a type of its items")
        items = node["items"] = self.convert(node["items"], place.items())
        list_type = node.get(LIST_TYPE)
        if list_type not in _LIST_TYPES:
            raise SchemaError(f"{place.name}: {LIST_TYPE} is {list_type!r}; say how it merges: atomic, set or map")
        if list_type == "set" and items["type"] not in _SCALARS:
            raise SchemaError(f"{place.name}: a set holds scalars only; use a map list with keys")
        keys = node.get(LIST_MAP_KEYS, [])
        if (list_type == "map") != bool(keys):
            raise SchemaError(f"{place.name}: {LIST_MAP_KEYS} belongs to, and only to, {LIST_TYPE}: map")
        for key in keys:
            if items.get("properties", {}).get(key, {}).get("type") not in _SCALARS or key not in items.get(
                "required", ()
            ):
                raise SchemaError(f"{place.name}: list-map key {key} must be a required scalar of the items")

    def _convert_object(self, node: Node, place: _Place) -> None:
        values = node.get("additionalProperties")
        preserve = node.get(PRESERVE_UNKNOWN)
        if preserve not in (None, True):
            raise SchemaError(f"{place.name}: {PRESERVE_UNKNOWN} may only be true")
        if preserve and values in (True, {}):  # dict[str, Any] says the same in pydantic's words
            node.pop("additionalProperties")
        elif values is not None:
            self._convert_map(node, values, place)
        if "properties" in node:
            node["properties"] = {
                name: self.convert(child, place.field(name)) for name, child in node["properties"].items()
            }
        elif not preserve and values is None:
            raise SchemaError(f"{place.name}: object without fields would be stored empty; add {PRESERVE_UNKNOWN}")
        if "required" in node:
            missing = set(node["required"]) - set(node.get("properties", {}))
            if missing:
                raise SchemaError(f"{place.name}: required fields {sorted(missing)} are not declared")
            if not node["required"]:
                node.pop("required")

    def _convert_map(self, node: Node, values: Any, place: _Place) -> None:
        if "properties" in node:
            raise SchemaError(f"{place.name}: properties and additionalProperties exclude each other")
        if not isinstance(values, dict) or not values:
            raise SchemaError(
                f"{place.name}: map of anything would be pruned; type its values or add {PRESERVE_UNKNOWN}"
            )
        converted = self.convert(values, place.values())
        if converted["type"] not in _SCALARS:
            raise SchemaError(f"{place.name}: maps of objects are banned from the API; use a list with list-map keys")
        if "maxProperties" not in node:
            raise SchemaError(f"{place.name}: map without max_length; CEL rules over it have no bounded cost")
        node["additionalProperties"] = converted


def _merge(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> Node:
    """``inner`` overlaid by ``outer``; CEL rules of both are kept, since each says something of its own."""
    merged = {**inner, **outer}
    rules = [*inner.get(VALIDATIONS, ()), *outer.get(VALIDATIONS, ())]
    if rules:
        merged[VALIDATIONS] = rules
    return merged
