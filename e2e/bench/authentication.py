"""The benches' engines authenticate each other, as deployed ones do: with a token of this run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from bidikv_runtime import contract


def write_token(folder: Path) -> dict[str, str]:
    """A fresh token in a file that only this user can read; returns what engines need in their environment."""
    path = folder / "token"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return {contract.ENV_TOKEN_FILE: str(path)}
