"""Load the configuration from its variable or a file, and let flags override it.

It is read once: the operator writes it into the pods, which roll when it changes. What is no name or port of the
cluster is also a flag, so that a router with static engines can use everything. Every error is one sentence that names
where the value came from, the field, and what to give instead.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from bidikv_runtime.contract import ENV_ROUTER_CONFIG, RouterConfig

SUPPORTED_VERSION: Final = 1

_FLAGS: Final = {
    "reuse": "where KV may come from for prefill: decode (Bidirectional), or nowhere (OneWay)",
    "source_count": "decode engines that are offered to prefill as sources",
    "state_port": "engines' port for reports; 0 to ask for none",
    "prefill_ranks": "data-parallel ranks of each prefill engine, whose ports count up by one",
    "decode_ranks": "data-parallel ranks of each decode engine",
    "ttft_objective_seconds": "what the 90th percentile of the time to first token should be; 0 for no objective",
    "itl_objective_seconds": "the same of the time between two tokens",
    "local_limit_tokens": "most prompt tokens that decode may compute alone; 0 for never",
    "missing_prefill": "when prefill does not say what it computed: decode computes it (Decode), or 502 (Fail)",
    "continue_streams": "go on with a stream on another engine when decode dies within",
    "cache_salt_by_tenant": "keep tenants' prefix caches apart",
    "tls_dir": "folder with tls.crt and tls.key: serve HTTPS",
    "access_log": "write one JSON line per request to standard output",
    "trace_endpoint": "OTLP/HTTP endpoint of OpenTelemetry traces, as http://collector:4318/v1/traces",
    "trace_ratio": "share of new traces that are sampled, 0 to 1",
    "debug": "serve /debug/sessions and obey x-bidikv-path",
}
"""Fields of the configuration that are also flags. The others name the cluster's things."""


class ConfigError(ValueError):
    """The configuration cannot be used; the text is one sentence."""


def choose_config(path: Path | None, environment: Mapping[str, str], *, is_static: bool) -> RouterConfig:
    """That of ``path``, else of the variable, else the defaults, which do for static engines only.

    Raises:
        ConfigError: as :func:`load_config`, or nothing says what the cluster's things are called.
    """
    if path is not None:
        return load_config(path)
    if text := environment.get(ENV_ROUTER_CONFIG):
        return parse_config(text.encode(), ENV_ROUTER_CONFIG)
    if is_static:
        return RouterConfig(namespace="", prefill_service="", decode_service="", served_model_name="")
    raise ConfigError(f"there is no configuration; set {ENV_ROUTER_CONFIG}, give --config, or name static engines.")


def load_config(path: Path) -> RouterConfig:
    """Read and check ``path``.

    Raises:
        ConfigError: the file is missing, is not JSON, lacks a field, has a wrong value or an unknown version.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give another path with --config.") from error
    return parse_config(text, str(path))


def parse_config(text: bytes, origin: str) -> RouterConfig:
    """Decode and check a configuration; ``origin`` names it in errors.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    try:
        config = msgspec.json.decode(text, type=RouterConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{origin}: {error}.") from error
    if config.version != SUPPORTED_VERSION:
        raise ConfigError(
            f"{origin}: version {config.version} is not supported, only {SUPPORTED_VERSION}; "
            "use an operator and a router of the same release."
        )
    for name, value in asdict(config).items():
        if name in _CHECKS and (remedy := _CHECKS[name](value)):
            raise ConfigError(f"{origin}: {name} is {value!r}; {remedy}.")
    return config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field in question (``--local-limit-tokens`` and so on); none has a default of its own."""
    group = parser.add_argument_group("configuration", "override the variable or file")
    kinds, defaults = get_type_hints(RouterConfig), {item.name: item.default for item in fields(RouterConfig)}
    for name, meaning in _FLAGS.items():
        kind = kinds[name]
        options: dict[str, Any] = {"type": kind, "metavar": "N" if kind in (int, float) else "TEXT"}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_args(kind):
            options = {"choices": get_args(kind)}
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, default=None, help=f"{meaning} (default: {defaults[name] or 'no'})", **options)


def override_config(config: RouterConfig, arguments: argparse.Namespace) -> RouterConfig:
    """``config`` with what the flags of :func:`add_config_arguments` say.

    Raises:
        ConfigError: a value is wrong; the sentence names the flag.
    """
    given = {name: value for name in _FLAGS if (value := getattr(arguments, name)) is not None}
    for name, value in given.items():
        if name in _CHECKS and (remedy := _CHECKS[name](value)):
            raise ConfigError(f"--{name.replace('_', '-')} is {value!r}; {remedy}.")
    return replace(config, **given)


# --- checks: what to give instead of a wrong value, or nothing ---


def _check_port(value: int) -> str:
    return "" if 0 < value < 65536 else "give a port from 1 to 65535"


def _check_optional_port(value: int) -> str:
    return "" if 0 <= value < 65536 else "give a port from 1 to 65535, or 0 to ask engines for no reports"


def _check_count(value: int) -> str:
    return "" if value >= 0 else "give a number of at least 0"


def _check_ranks(value: int) -> str:
    return "" if 1 <= value <= 64 else "give a number from 1 to 64"


def _check_seconds(value: float) -> str:
    return "" if math.isfinite(value) and value >= 0 else "give a number of seconds, or 0 for no objective"


def _check_share(value: float) -> str:
    return "" if math.isfinite(value) and 0 <= value <= 1 else "give a number from 0 to 1"


def _check_endpoint(value: str) -> str:
    remedy = "give a URL as http://collector:4318/v1/traces, or nothing for no traces"
    try:
        url = urlsplit(value)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        usable = False
    return "" if usable or not value else remedy


_CHECKS: Final[dict[str, Callable[[Any], str]]] = {
    "engine_port": _check_port,
    "lookup_port": _check_port,
    "state_port": _check_optional_port,
    "source_count": _check_count,
    "prefill_ranks": _check_ranks,
    "decode_ranks": _check_ranks,
    "ttft_objective_seconds": _check_seconds,
    "itl_objective_seconds": _check_seconds,
    "local_limit_tokens": _check_count,
    "trace_endpoint": _check_endpoint,
    "trace_ratio": _check_share,
}
