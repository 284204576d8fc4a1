"""The certificate with which the router serves HTTPS, followed as it is renewed.

A mounted ``kubernetes.io/tls`` Secret changes under the router's feet, typically weeks before the old certificate ends.
The files are looked at every few seconds; new handshakes use the new certificate, connections that exist go on. What
cannot be used is logged and the old certificate kept: a bad renewal must not end a working service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
_LOOK_SECONDS: Final = 10.0
"""A kubelet takes about a minute to bring a changed Secret to its pods."""

Signature = tuple[tuple[int, int, int], ...]


class TlsError(ValueError):
    """The certificate cannot be used; the text is one sentence that names the file."""


class Certificate:
    """The current certificate and key of a folder."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            TlsError: a file is missing, is not PEM, or the two do not belong together.
        """
        self._folder = folder
        self._seen = _look(folder)
        self.context = self._newest = build_context(folder)
        """For the listener: hands every handshake to the newest certificate."""
        self.context.sni_callback = self._use_newest  # OpenSSL calls it for clients that send no name, too
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, seconds: float = _LOOK_SECONDS) -> None:
        """Follow changes from now on, looking every ``seconds``."""
        self.apply_change()
        self._timer = loop.call_later(seconds, self.watch, loop, seconds)

    def close(self) -> None:
        """Stop to follow changes."""
        if self._timer is not None:
            self._timer.cancel()

    def apply_change(self) -> None:
        """Load the certificate again if a file has changed."""
        seen = _look(self._folder)
        if seen == self._seen:
            return
        self._seen = seen  # as it was before loading: a change in between is seen the next time
        try:
            self._newest = build_context(self._folder)
        except TlsError as error:
            logger.warning("The TLS certificate was not renewed: %s The old one stays in use.", error)
        else:
            logger.info("The TLS certificate was renewed from %s", self._folder)

    def _use_newest(self, tls: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        if self._newest is not context:
            tls.context = self._newest


def build_context(folder: Path) -> ssl.SSLContext:
    """A server's context: TLS 1.2 or newer, HTTP/1.1 only.

    Raises:
        TlsError: as :class:`Certificate`.
    """
    certificate, key = folder / CERTIFICATE_FILE, folder / KEY_FILE
    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise TlsError(
                f"{path}: cannot be read ({error.strerror}); mount a Secret of type kubernetes.io/tls there."
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password="")  # else OpenSSL asks for one on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key}: is not the key of {certificate.name}; replace both files together.") from error
        raise TlsError(
            f"{folder}: {certificate.name} or {key.name} is not PEM without a password ({error.reason or error})."
        ) from error
    return context


def _look(folder: Path) -> Signature:
    """What changes when a file does; a Secret's update swaps a symbolic link above both."""
    found = []
    for name in (CERTIFICATE_FILE, KEY_FILE):
        try:
            status = os.stat(folder / name)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
