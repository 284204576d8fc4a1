"""Whose request it is, as far as credentials tell; pure.

Why: sessions of different tenants must not be taken for one only because both began with "hello", and with
``cache_salt_by_tenant`` one tenant cannot find out by timing what another one has asked.

Invariant: a credential is only ever used through a digest; it is neither kept nor logged.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec

from bidikv_runtime.router.api.splice import Fields

CREDENTIALS: Final = (b"authorization", b"x-api-key")
"""Header names of OpenAI's and of Anthropic's keys."""
CACHE_SALT: Final = "cache_salt"


def compute_tenant(credentials: bytes) -> bytes:
    """Digest (16 bytes) of a credential's header value; empty for requests without one."""
    return blake2b(credentials, digest_size=16, person=b"bidikv.tenant").digest() if credentials else b""


def compute_cache_salt(tenant: bytes, fields: Fields) -> bytes | None:
    """The ``cache_salt`` of both legs, encoded as JSON: 64 hexadecimal digits.

    It depends on the tenant and on the client's own salt. Nobody can choose the salt of another tenant: that takes a
    preimage of a digest of the other one's key.

    Returns:
        None when the client's salt is none that vLLM accepts (a non-empty string): let the engine say so.
    """
    own = b""
    raw = fields.get(CACHE_SALT)
    if raw is not None and bytes(raw) != b"null":
        try:
            own = msgspec.json.decode(raw, type=str).encode("utf-8", "surrogatepass")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if not own:
            return None
    digest = blake2b(tenant, digest_size=32, person=b"bidikv.salt")
    digest.update(own)
    return b'"%b"' % digest.hexdigest().encode("ascii")
