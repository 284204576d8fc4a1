"""Keys of label and annotation maps, which a CRD's schema cannot check."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from bidikv_operator import names
from bidikv_operator.validate.problem import Problem, Problems

_KEY: Final = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
_PREFIX: Final = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")


def is_label_key(key: str) -> bool:
    """Whether Kubernetes takes it as the key of a label or annotation: ``[prefix/]name``."""
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= 253 and _PREFIX.match(prefix)):
        return False
    return len(name) <= 63 and bool(_KEY.match(name))


def check_label_keys(field: str, entries: Mapping[str, str]) -> Problems:
    return [
        Problem(field, f"{key!r} is no key that Kubernetes takes; write it as name or prefix/name")
        for key in sorted(entries)
        if not is_label_key(key)
    ]


def check_owned_keys(field: str, entries: Mapping[str, str]) -> Problems:
    return [
        Problem(field, f"{key} belongs to the operator; remove it")
        for key in sorted(entries)
        if key.startswith(f"{names.GROUP}/") or key == names.LABEL_MANAGED_BY
    ]
