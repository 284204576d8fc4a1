"""Kubernetes quantities in the form in which the API server stores them.

Source: "Resource quantity" of the Kubernetes API reference: no precision is lost, no fractional digits, the exponent as
large as possible. A quantity in another form would compare as different from the live object for ever.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_UNITS: Final = {
    "binary": {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50},
    "decimal": {"M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15},
}


def canonical_cpu(value: int | str) -> str:
    """``0.5`` -> ``500m``, ``2000m`` -> ``2``, ``4`` -> ``4``, ``2000`` -> ``2k``."""
    text = str(value)
    milli = Decimal(text[:-1]) if text.endswith("m") else Decimal(text) * 1000
    whole, rest = divmod(int(milli), 1000)
    if rest:
        return f"{int(milli)}m"
    return f"{whole // 1000}k" if whole % 1000 == 0 else str(whole)


def canonical_memory(value: str) -> str:
    """``1024Mi`` -> ``1Gi``, ``1500M`` -> ``1500M``, ``2000M`` -> ``2G``."""
    match = re.fullmatch(r"([0-9]+)([A-Za-z]+)", value)
    if match is None:
        raise ValueError(f"{value!r} is no quantity of memory")
    number, unit = int(match[1]), match[2]
    units = _UNITS["binary"] if unit.endswith("i") else _UNITS["decimal"]
    size = number * units[unit]
    largest = max((name for name in units if size % units[name] == 0), key=units.__getitem__)
    return f"{size // units[largest]}{largest}"
