"""What every model of the API is made of: the base class, CEL rules, list kinds and the bounded scalars.

A bounded scalar carries its schema and its check in Python, so that a resource written in Python meets the same limits
as one that the API server reads.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Base of every part of the resource: frozen, camelCase on the wire."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")


def cel(rule: str, message: str, field_path: str | None = None) -> dict[str, str]:
    """One ``x-kubernetes-validations`` entry.

    ``message`` is the sentence that the user reads: it names the field and the remedy. ``field_path`` (``.extraArgs``)
    makes the API server's error point at that field instead of the object that holds the rule.
    """
    entry = {"rule": rule, "message": message}
    if field_path is not None:
        entry["fieldPath"] = field_path
    return entry


def validations(*rules: dict[str, str]) -> dict[str, Any]:
    """``json_schema_extra`` of a model or field that carries CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


def map_list(key: str) -> dict[str, Any]:
    """``json_schema_extra`` of a list whose items are told apart (and merged by server-side apply) by ``key``."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


SET_LIST: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}
ATOMIC_LIST: Final[dict[str, Any]] = {"x-kubernetes-list-type": "atomic"}
"""Order matters or items repeat: whoever applies the list owns all of it."""


def int_or_string(*, minimum: int, maximum: int, pattern: str, max_length: int) -> Any:
    """A field that takes a whole number or a word, as ``1`` or ``25%``: bounds hold for numbers, the rest for words."""

    def check(value: int | str) -> int | str:
        if isinstance(value, str):
            if len(value) > max_length or not re.search(pattern, value):
                raise ValueError(f"{value!r} does not match {pattern}")
        elif isinstance(value, bool) or not minimum <= value <= maximum:
            raise ValueError(f"{value} is not from {minimum} to {maximum}")
        return value

    schema = {
        "x-kubernetes-int-or-string": True,
        "minimum": minimum,
        "maximum": maximum,
        "pattern": pattern,
        "maxLength": max_length,
    }
    return Annotated[int | str, AfterValidator(check), WithJsonSchema(schema)]


# DNS subdomain, as Kubernetes checks the names of Secrets and PersistentVolumeClaims.
_DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=_DNS_SUBDOMAIN)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
"""Value of a label, as Kubernetes checks it; keys of label maps are checked by ``validate``."""
LabelKey = Annotated[
    str, Field(min_length=1, max_length=317, pattern=r"^([-a-z0-9.]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
ImageReference = Annotated[
    str,
    Field(
        min_length=1,
        max_length=512,
        json_schema_extra=validations(
            cel(
                "!self.matches('[[:space:]]') && !self.contains('://')",
                "image must be an image reference such as vllm/vllm-openai:v0.32.0: remove white space and 'https://'",
            )
        ),
    ),
]
Replicas = Annotated[int, Field(ge=0, le=1024)]
Switch = Literal["Enabled", "Disabled"]
"""Instead of a boolean: it can grow a third word."""
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Generation = Annotated[int, Field(ge=0, le=2**53, json_schema_extra={"format": "int64"})]
