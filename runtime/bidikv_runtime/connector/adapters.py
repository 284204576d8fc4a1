"""LoRA adapters: block hashes that also cover the adapter's weights.

vLLM's block hash covers an adapter's name and path (``_gen_lora_extra_hash_keys`` in v1/core/kv_cache_utils.py), not
what lies there. Two engines may have loaded different weights under one name and path, for example of two versions of a
volume. So what a request with an adapter publishes and looks up goes by hashes that are mixed with an identity of the
adapter's files.

vLLM loads an adapter when it is first used, and again after it fell out of its cache. Which weights an engine holds is
therefore known only while the files stay as they were: once they have changed, or when the adapter is to be reloaded in
place, its KV is neither published nor looked up until the engine restarts.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAXIMUM_ADAPTERS: Final = 1024
"""Adapters remembered; the one not used longest is forgotten, and identified anew when it comes again."""
CONFIG_FILE: Final = "adapter_config.json"
FILES: Final = (CONFIG_FILE, "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM reads of an adapter's folder (lora/lora_model.py, lora/peft_helper.py)."""
MAXIMUM_CONFIG_BYTES: Final = 1 << 20
SAMPLES: Final = 16
SAMPLE_BYTES: Final = 4096
"""Weights are sampled: training again changes all of them but neither shapes nor sizes, and reading a file of 500 MB
whole would stop the scheduler for a second."""

Signature = tuple[tuple[int, int, int] | None, ...]


class AdapterError(ValueError):
    """An adapter cannot be identified."""


@dataclass(frozen=True)
class _Known:
    signature: Signature
    identity: bytes | None
    """None: its KV is not shared."""


def scope_hashes(hashes: Sequence[bytes], identity: bytes) -> list[bytes]:
    """Hashes of 32 bytes that differ for different adapters; ``identity`` is always of one length."""
    return [hashlib.blake2b(identity + content, digest_size=32).digest() for content in hashes]


def compute_identity(name: str, path: str, base_model: str | None, folder: Path | None = None) -> bytes:
    """32 bytes that are equal for equal adapters: name, path, base model, configuration, and size and samples of the
    weights. The files are in ``folder``, by default the path itself.

    Raises:
        AdapterError: one sentence that names the adapter and the remedy.
    """
    digest = hashlib.blake2b(digest_size=32)

    def add(*values: bytes) -> None:
        for value in values:
            digest.update(len(value).to_bytes(8, "little") + value)

    add(name.encode(), path.encode(), (base_model or "").encode())
    folder = folder or Path(path).expanduser()
    try:
        for file_name in FILES:
            file_path = folder / file_name
            if file_path.exists():
                add(file_name.encode(), *_sample(file_path, whole=file_name == CONFIG_FILE))
            elif file_name == CONFIG_FILE:
                raise AdapterError(
                    f"adapter {name!r} has no {CONFIG_FILE} in {path!r}: give its path as a local folder for its KV to "
                    "be shared"
                )
    except OSError as error:
        raise AdapterError(
            f"adapter {name!r} cannot be read ({error}): make its files readable for its KV to be shared"
        ) from None
    return digest.digest()


class Adapters:
    """Identities of the adapters in use. For one thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._known: OrderedDict[tuple[int, str, str], _Known] = OrderedDict()

    def scope(self, hashes: Sequence[bytes], adapter: Any) -> Sequence[bytes]:
        """Hashes under which a request's blocks are published and looked up; none when they must not be shared.

        Args:
            hashes: vLLM's block hashes of the request.
            adapter: vLLM's ``LoRARequest``, or None.
        """
        if adapter is None:
            return hashes
        identity = self._identify(adapter)
        return [] if identity is None else scope_hashes(hashes, identity)

    def _identify(self, adapter: Any) -> bytes | None:
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        known, signature = self._known.get(key), _sign(adapter.lora_path)
        if known is None:
            known = _Known(signature, self._compute(adapter))
        elif known.signature != signature and known.identity is not None:
            self._logger.warning(
                "the files of adapter %r in %r have changed: its KV is not shared any more; load it under a new path "
                "or restart the engine",
                adapter.lora_name,
                adapter.lora_path,
            )
            known = _Known(known.signature, None)
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > MAXIMUM_ADAPTERS:
            self._known.popitem(last=False)
        return known.identity

    def _compute(self, adapter: Any) -> bytes | None:
        if adapter.load_inplace:
            self._logger.warning(
                "adapter %r is loaded in place: its KV is not shared, as its weights may change under one path; load "
                "it without load_inplace",
                adapter.lora_name,
            )
            return None
        try:
            return compute_identity(adapter.lora_name, adapter.lora_path, adapter.base_model_name)
        except AdapterError as error:
            self._logger.warning("%s", error)
            return None


def _sign(path: str) -> Signature:
    """What changes when a file of the adapter does."""
    return tuple(_stat(os.path.join(os.path.expanduser(path), name)) for name in FILES)


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _sample(path: Path, *, whole: bool) -> tuple[bytes, ...]:
    """The file's size, and all of it or evenly spaced pieces, the first and the last among them."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = size.to_bytes(8, "little")
        if whole:
            if size > MAXIMUM_CONFIG_BYTES:
                raise OSError(f"{path.name} has {size} bytes, over the limit of {MAXIMUM_CONFIG_BYTES}")
            return length, file.read(MAXIMUM_CONFIG_BYTES)
        last = max(0, size - SAMPLE_BYTES)
        pieces = []
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            pieces.append(file.read(SAMPLE_BYTES))
    return length, *pieces
