"""Load the mounted configuration file.

It is read once: the operator rolls the pods when it changes. Every error is one sentence that names the file and the
field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from bidikv_runtime.contract import RouterConfig

SUPPORTED_VERSION: Final = 1


class ConfigError(ValueError):
    """The configuration cannot be used; the text is one sentence."""


def load_config(path: Path) -> RouterConfig:
    """Read and check ``path``.

    Raises:
        ConfigError: the file is missing, is not JSON, lacks a field, has a wrong value or an unknown version.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); mount the ConfigMap there.") from error
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
    if config.source_count < 0:
        raise ConfigError(f"{origin}: source_count is {config.source_count}; give a number of at least 0.")
    for name in ("engine_port", "lookup_port"):
        if not 0 < getattr(config, name) < 65536:
            raise ConfigError(f"{origin}: {name} is {getattr(config, name)}; give a port from 1 to 65535.")
    return config
