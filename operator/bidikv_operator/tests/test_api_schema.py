"""The converter: one accepted and one refused case per rule, and properties over generated models."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model

from bidikv_operator.api.base import IntOrString, cel, map_list, validations
from bidikv_operator.api.schema import Node, SchemaError, build_open_api_schema, convert_json_schema

ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
PRESERVE: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}
Text = Annotated[str, Field(max_length=10)]


class Item(BaseModel):
    """An item."""

    name: Text = Field(description="Its name.")
    size: int | None = Field(default=None, ge=0, le=9, description="Its size.")


class ItemWithDefault(BaseModel):
    """An item whose field has a default."""

    name: Text = Field(description="Its name.")
    size: int = Field(default=1, ge=0, le=9, description="Its size.")


class Strict(BaseModel):
    """A model that forbids unknown fields."""

    model_config = ConfigDict(extra="forbid")
    name: Text = Field(description="Its name.")


class WithRule(BaseModel):
    """A model with a CEL rule."""

    model_config = ConfigDict(json_schema_extra=validations(cel("self.name != ''", "name is empty: set it")))
    name: Text = Field(description="Its name.")


class Recursive(BaseModel):
    """A model that contains itself."""

    child: Recursive | None = Field(default=None, description="A child.")


def schema_of(annotation: Any, **field: Any) -> Node:
    """The converted schema of the one field ``x`` of a model."""
    field.setdefault("description", "A field.")
    model = create_model("Model", __doc__="A model.", x=(annotation, Field(**field)))
    converted: Node = build_open_api_schema(model)["properties"]["x"]
    return converted


ACCEPTED: list[tuple[str, Any, dict[str, Any], Node]] = [
    ("string", str, {"max_length": 5}, {"type": "string", "maxLength": 5}),
    ("pattern", str, {"max_length": 5, "pattern": "^a+$"}, {"type": "string", "maxLength": 5, "pattern": "^a+$"}),
    (
        "date-time is bounded by its format",
        str,
        {"json_schema_extra": {"format": "date-time"}},
        {"type": "string", "format": "date-time"},
    ),
    ("integer", int, {"ge": 0, "le": 9}, {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9}),
    (
        "int64 by its format",
        int,
        {"ge": 0, "le": 2**53, "json_schema_extra": {"format": "int64"}},
        {"type": "integer", "format": "int64", "minimum": 0, "maximum": 2**53},
    ),
    ("boolean", bool, {}, {"type": "boolean"}),
    ("enum", Literal["A", "B"], {}, {"type": "string", "enum": ["A", "B"]}),
    ("const becomes enum", Literal["A"], {}, {"type": "string", "enum": ["A"]}),
    ("optional collapses", Text | None, {"default": None}, {"type": "string", "maxLength": 10}),
    (
        "atomic list",
        list[Text],
        {"max_length": 3, "json_schema_extra": ATOMIC},
        {
            "type": "array",
            "x-kubernetes-list-type": "atomic",
            "maxItems": 3,
            "items": {"type": "string", "maxLength": 10},
        },
    ),
    (
        "bounded map of scalars",
        dict[str, Text],
        {"max_length": 3},
        {"type": "object", "maxProperties": 3, "additionalProperties": {"type": "string", "maxLength": 10}},
    ),
    (
        "number or word",
        Annotated[int | str, IntOrString(minimum=0, maximum=9, pattern="^[0-9]+%$", max_length=4)],
        {},
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": 9,
            "maxLength": 4,
            "pattern": "^[0-9]+%$",
        },
    ),
    (
        "map with at least one entry",
        dict[str, Text],
        {"min_length": 1, "max_length": 3},
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 3,
            "additionalProperties": {"type": "string", "maxLength": 10},
        },
    ),
    (
        "anything, when marked",
        dict[str, Any],
        {"json_schema_extra": PRESERVE},
        {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    ),
    (
        "extra=forbid is the API server's business",
        Strict,
        {},
        {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"description": "Its name.", "type": "string", "maxLength": 10}},
        },
    ),
]


@pytest.mark.parametrize(("annotation", "field", "expected"), [c[1:] for c in ACCEPTED], ids=[c[0] for c in ACCEPTED])
def test_accepted(annotation: Any, field: dict[str, Any], expected: Node) -> None:
    assert schema_of(annotation, **field) == {"description": "A field.", **expected}


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("no description", bool, {"description": ""}, "x: has no description"),
    ("unbounded string", str, {}, "x: string without max_length"),
    ("unchecked format", str, {"json_schema_extra": {"format": "email"}}, "x: format email"),
    ("look-ahead", str, {"max_length": 5, "json_schema_extra": {"pattern": "^(?=a)"}}, "x: pattern uses"),
    ("back-reference", str, {"max_length": 5, "json_schema_extra": {"pattern": r"(a)\1"}}, "x: pattern uses"),
    ("no lower bound", int, {"le": 9}, "x: integer without both bounds"),
    ("no upper bound", int, {"ge": 0}, "x: integer without both bounds"),
    ("beyond int32", int, {"ge": 0, "le": 2**31}, "x: bounds 0..2147483648 do not fit int32"),
    (
        "beyond float64's whole numbers",
        int,
        {"ge": 0, "le": 2**63 - 1, "json_schema_extra": {"format": "int64"}},
        "do not fit int64",
    ),
    ("odd integer format", int, {"ge": 0, "le": 1, "json_schema_extra": {"format": "int8"}}, "x: format int8"),
    ("gt", int, {"gt": 0, "le": 9}, "x: exclusiveMinimum is not structural; use ge"),
    ("lt", int, {"ge": 0, "lt": 9}, "x: exclusiveMaximum is not structural; use le"),
    ("multiple_of", int, {"ge": 0, "le": 9, "multiple_of": 3}, "x: multipleOf is not structural"),
    ("float", float, {"ge": 0, "le": 1}, "x: floats are banned"),
    ("any", Any, {}, "x: type None is not structural"),
    ("integer enum", Literal[1, 2], {}, "x: enums are strings"),
    ("union", bool | Text, {}, "x: anyOf is not structural; use optional sub-objects"),
    ("optional union", bool | Text | None, {"default": None}, "x: anyOf is not structural"),
    ("required null", Text | None, {}, "x: required but may be null"),
    ("default", int, {"default": 1, "ge": 0, "le": 9}, "x: defaults are written into stored objects"),
    ("default of an optional", Text | None, {"default": "a"}, "x: defaults are written"),
    ("default in a list item", list[ItemWithDefault], {"max_length": 3, "json_schema_extra": ATOMIC}, r"x\[\]\.size"),
    ("unbounded list", list[bool], {"json_schema_extra": ATOMIC}, "x: list without max_length"),
    ("untyped list", list[Any], {"max_length": 3, "json_schema_extra": ATOMIC}, "x: list without a type of its items"),
    ("no list type", list[bool], {"max_length": 3}, "x: x-kubernetes-list-type is None"),
    (
        "set of objects",
        list[Item],
        {"max_length": 3, "json_schema_extra": {"x-kubernetes-list-type": "set"}},
        "x: a set holds scalars",
    ),
    (
        "map list without keys",
        list[Item],
        {"max_length": 3, "json_schema_extra": {"x-kubernetes-list-type": "map"}},
        "x: x-kubernetes-list-map-keys belongs to",
    ),
    (
        "keys without map list",
        list[Item],
        {"max_length": 3, "json_schema_extra": {**map_list("name"), **ATOMIC}},
        "x: x-kubernetes-list-map-keys belongs to",
    ),
    ("optional key", list[Item], {"max_length": 3, "json_schema_extra": map_list("size")}, "x: list-map key size"),
    ("unknown key", list[Item], {"max_length": 3, "json_schema_extra": map_list("no")}, "x: list-map key no"),
    ("python set", set[Text], {"max_length": 3}, "x: uniqueItems is not structural; use a list"),
    (
        "number or word without bounds",
        Annotated[int | str, WithJsonSchema({"x-kubernetes-int-or-string": True, "minimum": 0, "maximum": 1})],
        {},
        "x: x-kubernetes-int-or-string without maxLength; bound both its numbers and its words",
    ),
    (
        "number or word that says it is none",
        Annotated[int | str, WithJsonSchema({"x-kubernetes-int-or-string": False})],
        {},
        "x: type None is not structural",
    ),
    ("tuple", tuple[Text, Text], {}, "x: prefixItems is not structural; use an object"),
    ("unmarked dict", dict[str, Any], {}, "x: map of anything would be pruned"),
    ("unbounded map", dict[str, Text], {}, "x: map without max_length"),
    ("map of objects", dict[str, Item], {"max_length": 3}, "x: maps of objects are banned"),
    ("recursion", Recursive, {}, r"x\.child: Recursive contains itself"),
    ("unknown keyword", bool, {"json_schema_extra": {"x-nonsense": 1}}, "x: keyword x-nonsense is unknown"),
    ("keyword of another type", bool, {"json_schema_extra": {"minimum": 1}}, "x: keyword minimum is unknown for type"),
    ("examples", str, {"max_length": 5, "examples": ["a"]}, "x: examples is not structural"),
    ("rule without message", bool, {"json_schema_extra": validations({"rule": "self"})}, "x: a CEL rule needs"),
    (
        "misspelt rule",
        bool,
        {"json_schema_extra": validations({"rule": "self", "message": "m", "fieldpath": ".x"})},
        r"x: CEL rule has unknown keys \['fieldpath'\]",
    ),
]


@pytest.mark.parametrize(("annotation", "field", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused_with_the_field_and_the_remedy(annotation: Any, field: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        schema_of(annotation, **field)


def test_a_fields_description_wins_over_its_models_docstring() -> None:
    assert schema_of(Item, description="The field's.")["description"] == "The field's."


def test_a_models_docstring_describes_a_field_that_has_nothing_to_add() -> None:
    assert schema_of(Item, description=None)["description"] == "An item."


def test_rules_of_field_and_model_are_both_kept() -> None:
    rule = cel("self.name != 'b'", "name is b: change it")
    rules = schema_of(WithRule, json_schema_extra=validations(rule))["x-kubernetes-validations"]
    assert rules == [cel("self.name != ''", "name is empty: set it"), rule]


def test_the_same_model_may_stand_at_two_places() -> None:
    model = create_model(
        "Model", __doc__="A model.", a=(Item, Field(description="First.")), b=(Item, Field(description="Second."))
    )
    properties = build_open_api_schema(model)["properties"]
    assert properties["a"]["properties"] == properties["b"]["properties"]


def test_an_allowed_default_is_kept() -> None:
    model = create_model("Model", __doc__="A model.", x=(int, Field(default=1, ge=0, le=9, description="A field.")))
    assert build_open_api_schema(model, allowed_defaults=["x"])["properties"]["x"]["default"] == 1


def test_an_allowed_default_in_a_list_item_is_still_refused() -> None:
    items = (list[ItemWithDefault], Field(max_length=3, description="Items.", json_schema_extra=ATOMIC))
    model: type[BaseModel] = create_model("Model", __doc__="A model.", x=items)
    with pytest.raises(SchemaError, match="inside a list item"):
        build_open_api_schema(model, allowed_defaults=["x[].size"])


def test_an_allowed_default_that_is_not_there_is_refused() -> None:
    model = create_model("Model", __doc__="A model.", x=(bool, Field(description="A field.")))
    with pytest.raises(SchemaError, match=r"fields without a default, remove them: spec\.y"):
        build_open_api_schema(model, allowed_defaults=["spec.y"])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"$ref": "#/$defs/Nobody"}, "reference to unknown definition Nobody"),
        ({"type": "object", "properties": {}, "required": ["a"]}, r"required fields \['a'\] are not declared"),
        ({"type": "object"}, "object without fields"),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "boolean"}}, "exclude each other"),
        ({"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": False}, "may only be true"),
        ({"type": "null"}, "type 'null' is not structural"),
    ],
)
def test_documents_that_no_model_yields_are_refused(node: Node, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        convert_json_schema({"description": "A document.", **node})


# --- properties over generated models -------------------------------------------------------------------------------


@st.composite
def scalars(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    low = draw(st.integers(-(2**31), 2**31 - 1))
    return draw(
        st.sampled_from(
            [
                (bool, {}),
                (str, {"max_length": draw(st.integers(0, 1000))}),
                (int, {"ge": low, "le": draw(st.integers(low, 2**31 - 1))}),
                (Literal["Enabled", "Disabled"], {}),
                (Literal["Only"], {}),
            ]
        )
    )


@st.composite
def fields(draw: st.DrawFn, depth: int) -> tuple[Any, dict[str, Any]]:
    kind = draw(st.sampled_from(["scalar", "list", "map", "model"] if depth else ["scalar"]))
    if kind == "scalar":
        return draw(scalars())
    if kind == "model":
        return draw(models(depth - 1)), {}
    annotation, bounds = draw(fields(depth - 1) if kind == "list" else scalars())
    inner: Any = Annotated[annotation, Field(**bounds)]
    limit = {"max_length": draw(st.integers(0, 100))}
    return (list[inner], limit | {"json_schema_extra": ATOMIC}) if kind == "list" else (dict[str, inner], limit)


@st.composite
def models(draw: st.DrawFn, depth: int = 3) -> type[BaseModel]:
    members: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)):
        annotation, arguments = draw(fields(depth))
        optional: dict[str, Any] = {"default": None} if draw(st.booleans()) else {}
        if "json_schema_extra" not in arguments and draw(st.booleans()):
            arguments = arguments | {"title": "A title"}
        members[name] = (
            annotation | None if optional else annotation,
            Field(description=name, **arguments, **optional),
        )
    # Equal names on purpose: pydantic then has to tell its definitions apart.
    return create_model("Generated", __doc__="Generated.", **members)


def nodes(node: Node) -> Iterator[Node]:
    """``node`` and every schema below it."""
    yield node
    for child in node.get("properties", {}).values():
        yield from nodes(child)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key])


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Building models takes time, on a busy machine a lot of it; that is no failure."""
FORBIDDEN = {"$ref", "$defs", "title", "const", "anyOf", "oneOf", "allOf", "uniqueItems", "exclusiveMinimum", "default"}


@PATIENT
@given(models())
def test_what_comes_out_is_structural(model: type[BaseModel]) -> None:
    for node in nodes(build_open_api_schema(model)):
        assert not FORBIDDEN & set(node)
        assert node["type"] in {"string", "integer", "boolean", "array", "object"}
        assert not ("properties" in node and "additionalProperties" in node)
        assert set(node.get("required", ())) <= set(node.get("properties", {}))


@PATIENT
@given(models())
def test_converting_twice_changes_nothing(model: type[BaseModel]) -> None:
    once = build_open_api_schema(model)
    assert convert_json_schema(once) == once


@PATIENT
@given(models())
def test_fields_and_requirements_are_those_of_the_model(model: type[BaseModel]) -> None:
    schema = build_open_api_schema(model)
    assert list(schema["properties"]) == list(model.model_fields)
    assert set(schema.get("required", ())) == {n for n, field in model.model_fields.items() if field.is_required()}


@PATIENT
@given(models(), st.data())
def test_one_unknown_keyword_anywhere_is_refused(model: type[BaseModel], data: st.DataObject) -> None:
    document = copy.deepcopy(build_open_api_schema(model))
    data.draw(st.sampled_from(list(nodes(document))))["x-unknown"] = True
    with pytest.raises(SchemaError, match=re.escape("x-unknown")):
        convert_json_schema(document)
