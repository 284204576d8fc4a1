"""What every model of the API is made of: the base class, CEL rules, list kinds and the bounded scalars.

A bounded scalar carries its schema and its check in Python, so that a resource written in Python meets the same limits
as one that the API server reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema


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


@dataclass(frozen=True, kw_only=True)
class IntOrString:
    """Annotation of ``int | str``: a whole number or a word, as ``1`` or ``25%``. Bounds hold for numbers, the rest for
    words."""

    minimum: int
    maximum: int
    pattern: str
    max_length: int

    def check(self, value: object) -> object:
        if isinstance(value, str):
            if len(value) > self.max_length or not re.search(self.pattern, value):
                raise ValueError(f"{value!r} does not match {self.pattern}")
        elif not isinstance(value, int) or isinstance(value, bool) or not self.minimum <= value <= self.maximum:
            raise ValueError(f"{value} is not from {self.minimum} to {self.maximum}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "x-kubernetes-int-or-string": True,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "pattern": self.pattern,
            "maxLength": self.max_length,
        }


# DNS subdomain, as Kubernetes checks the names of Secrets and PersistentVolumeClaims.
_DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=_DNS_SUBDOMAIN)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
"""Value of a label, as Kubernetes checks it; keys of label maps are checked by ``validate``."""
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)]
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
