"""The connector's settings: keys ``bidikv_*`` of ``kv_connector_extra_config``, parsed once at engine start.

A wrong or misspelt key stops the engine with one sentence: a silently ignored setting would show up as a slow service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_runtime import contract

PREFIX: Final = "bidikv_"


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type or out of range."""


@dataclass(frozen=True)
class Settings:
    """Durations in seconds unless the name says otherwise."""

    lookup_host: str
    """Address on which the lookup port listens."""
    lookup_port: int
    minimum_tokens: int = 64
    """Fewer tokens than this are recomputed rather than read: a read costs a parked request and two engine steps."""
    lookup_deadline: float = 0.2
    """A source that has not answered a lookup after this is silent; what it may hold is recomputed."""
    inline_wait: float = 0.01
    """How long the scheduler waits in place for lookup answers (0.7-1.0 ms is usual, 7.7 ms the longest seen). Putting
    the request off instead costs a whole engine step, up to 700 ms under load."""
    settle_wait: float = 0.02
    """After the first answer that helps, how long slower sources may still come up with a longer prefix."""
    silent_period: float = 1.0
    """A silent source is not asked again for this long; the period doubles with each further silence."""
    silent_period_maximum: float = 60.0
    connect_deadline: float = 0.5
    """Limit for the first connection to a source's NIXL side channel."""
    validate_deadline: float = 1.0
    """A source that does not confirm a read within this is taken as gone: the read is discarded."""
    validate_wait: float = 0.005
    """How long the worker waits in place for a confirmation, to spare the request another engine step."""
    progress_delay_us: int = 5000
    """Poll delay of NIXL's progress thread. 0 (NIXL's own default) burns most of a core per engine; 5000 costs 0.015 of
    a core and no read latency, because the thread then waits on events."""
    state_port: int = contract.STATE_PORT
    """Port of the JSON state; 0 for none."""
    read_deadline: float = 10.0
    """A read that takes longer is abandoned: its request is recomputed in other blocks, its own are quarantined."""
    probe_bytes: int = 4 << 20
    """Bytes read from a new peer to measure the bandwidth to it; 0 for no measurement."""
    cost_model: str = "Learned"
    """``Learned``: read what is cheaper to read than to recompute. ``AlwaysPull``: read whatever is found."""
    retention: str = "SessionAware"
    """``LRU``: vLLM's own eviction order. ``SessionAware``: blocks of sessions that will be back are evicted last."""
    retention_budget: float = 0.6
    """Share of the block pool that sessions may hold. Held blocks count as free. In replayed agent traffic 0.6
    recomputes less than 0.3, and 0.9 costs single chats more than it gains (``e2e/bench/retention``)."""
    retention_idle: float = 600.0
    """A session not heard of for this long is held no more."""
    handover_seconds: float = 5.0
    """How long a finished prefill is held for the decode engine that will read it."""
    handover_budget: float = 0.2
    """Share of the block pool that finished prefills may hold."""
    recompute_limit_tokens: int = 2048
    """A decode engine that would have to compute more than this of what prefill announced refuses the request; 0 for no
    limit."""


@dataclass(frozen=True)
class _Key:
    field: str
    lowest: float
    highest: float
    scale: float = 1.0
    """Multiplies the configured number to give the field's unit."""
    whole: bool = False


_CHOICES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "bidikv_cost_model": ("cost_model", ("Learned", "AlwaysPull")),
    "bidikv_retention": ("retention", ("LRU", "SessionAware")),
}
"""Keys that take one of a few words: their field and the words."""


_KEYS: Final[dict[str, _Key]] = {
    "bidikv_lookup_port": _Key("lookup_port", 1, 65535, whole=True),
    "bidikv_minimum_tokens": _Key("minimum_tokens", 1, 1_000_000, whole=True),
    "bidikv_lookup_deadline_ms": _Key("lookup_deadline", 1, 10_000, 1e-3),
    "bidikv_inline_wait_ms": _Key("inline_wait", 0, 100, 1e-3),
    "bidikv_settle_wait_ms": _Key("settle_wait", 0, 1_000, 1e-3),
    "bidikv_silent_period_seconds": _Key("silent_period", 0, 600),
    "bidikv_connect_deadline_ms": _Key("connect_deadline", 1, 10_000, 1e-3),
    "bidikv_validate_deadline_ms": _Key("validate_deadline", 1, 10_000, 1e-3),
    "bidikv_validate_wait_ms": _Key("validate_wait", 0, 100, 1e-3),
    "bidikv_progress_delay_us": _Key("progress_delay_us", 0, 1_000_000, whole=True),
    "bidikv_silent_period_maximum_seconds": _Key("silent_period_maximum", 0, 3600),
    "bidikv_state_port": _Key("state_port", 0, 65535, whole=True),
    "bidikv_read_deadline_seconds": _Key("read_deadline", 0.1, 600),
    "bidikv_probe_bytes": _Key("probe_bytes", 0, 1 << 30, whole=True),
    "bidikv_retention_budget_percent": _Key("retention_budget", 0, 90, 1e-2),
    "bidikv_retention_idle_seconds": _Key("retention_idle", 1, 86_400),
    "bidikv_handover_seconds": _Key("handover_seconds", 0, 60),
    "bidikv_handover_budget_percent": _Key("handover_budget", 0, 90, 1e-2),
    "bidikv_recompute_limit_tokens": _Key("recompute_limit_tokens", 0, 1_000_000, whole=True),
}


def parse_settings(extra_config: Mapping[str, Any], environment: Mapping[str, str], default_host: str) -> Settings:
    """Settings from the extra config; keys without the prefix belong to NIXL and are left alone.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``.
        environment: ``contract.ENV_LOOKUP_HOST`` names the listening address.
        default_host: used when the environment names none (the NIXL side channel's host).

    Raises:
        SettingsError: one sentence that names the key and the remedy.
    """
    known = _KEYS.keys() | _CHOICES.keys()
    unknown = sorted(key for key in extra_config if key.startswith(PREFIX) and key not in known)
    if unknown:
        raise SettingsError(
            f"kv_connector_extra_config has the unknown key {unknown[0]!r}: use one of {', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {
        "lookup_host": environment.get(contract.ENV_LOOKUP_HOST) or default_host,
        "lookup_port": contract.LOOKUP_PORT,
    }
    for name, key in _KEYS.items():
        if name in extra_config:
            values[key.field] = _parse(name, key, extra_config[name])
    for name, (field, words) in _CHOICES.items():
        if name in extra_config:
            if extra_config[name] not in words:
                raise SettingsError(
                    f"kv_connector_extra_config.{name} is {extra_config[name]!r}: set it to {' or '.join(words)}"
                )
            values[field] = extra_config[name]
    return Settings(**values)


def _parse(name: str, key: _Key, value: Any) -> float | int:
    kind = "a whole number" if key.whole else "a number"
    right_type = isinstance(value, int) if key.whole else isinstance(value, int | float)
    if isinstance(value, bool) or not right_type or not key.lowest <= value <= key.highest:
        raise SettingsError(
            f"kv_connector_extra_config.{name} is {value!r}: set it to {kind} from {key.lowest:g} to {key.highest:g}"
        )
    number: float | int = value if key.whole else value * key.scale
    return number
