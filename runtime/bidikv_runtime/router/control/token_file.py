"""The token that shows engines that a router asks; a file that may change at any time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from bidikv_runtime.contract import ENV_TOKEN_FILE

logger = logging.getLogger(__name__)


class TokenFile:
    """The first token of the file, read again when the file changes."""

    def __init__(self, path: Path | None) -> None:
        """``path`` None: engines are asked without a token."""
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._token = ""
        self._complained = False

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> TokenFile:
        """The file that ``contract.ENV_TOKEN_FILE`` names, if any."""
        path = environment.get(ENV_TOKEN_FILE)
        return TokenFile(Path(path) if path else None)

    def build_headers(self) -> tuple[tuple[str, str], ...]:
        """For a request to an engine. A file that cannot be read leaves the last token in use."""
        if self._path is None:
            return ()
        try:
            status = self._path.stat()
            # A mounted Secret changes by a symbolic link, hence the inode.
            seen = status.st_mtime_ns, status.st_size, status.st_ino
            if seen != self._seen:
                lines = self._path.read_text("ascii").split()
                self._seen, self._token, self._complained = seen, lines[0] if lines else "", False
        except (OSError, UnicodeDecodeError) as error:
            if not self._complained:
                logger.warning(
                    "The token file %s (%s) cannot be read (%s); mount the Secret with the engines' tokens there",
                    self._path,
                    ENV_TOKEN_FILE,
                    error,
                )
                self._complained = True
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()
