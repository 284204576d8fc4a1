"""Hashes of requests with an adapter are equal only for equal weights, and unknown weights are not shared."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime.connector.adapters import (
    CONFIG_FILE,
    MAXIMUM_ADAPTERS,
    SAMPLE_BYTES,
    SAMPLES,
    AdapterError,
    Adapters,
    compute_identity,
    scope_hashes,
)

LOG = logging.getLogger("test")
HASHES = [bytes([n]) * 32 for n in range(3)]
WEIGHTS = "adapter_model.safetensors"


def write_adapter(folder: Path, config: str = "{}", weights: bytes = b"weights", name: str = WEIGHTS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(config)
    (folder / name).write_bytes(weights)
    return folder


def request_for(path: Path, name: str = "adapter", number: int = 1, **fields: Any) -> Any:
    """vLLM's ``LoRARequest``."""
    values = {"lora_name": name, "lora_int_id": number, "lora_path": str(path), "base_model_name": None}
    return SimpleNamespace(**values | {"load_inplace": False} | fields)


def scope(path: Path, **fields: Any) -> list[bytes]:
    """Hashes as another process gives them."""
    return list(Adapters(LOG).scope(HASHES, request_for(path, **fields)))


def test_without_an_adapter_hashes_are_as_they_are() -> None:
    assert Adapters(LOG).scope(HASHES, None) is HASHES


def test_equal_adapters_give_equal_hashes_in_every_process(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    scoped = scope(tmp_path)
    assert scoped == scope(tmp_path)
    assert {len(content) for content in scoped} == {32}
    assert not set(scoped) & set(HASHES)


SIZE = SAMPLES * SAMPLE_BYTES * 4


@pytest.mark.parametrize(
    "change",
    [
        {"config": '{"r": 8}'},
        {"weights": b"weightz"},
        {"weights": b"weights0"},
        {"weights": b""},
        {"name": "adapter_model.bin"},
    ],
    ids=str,
)
def test_other_files_under_one_name_and_path_give_other_hashes(tmp_path: Path, change: dict[str, Any]) -> None:
    before = scope(write_adapter(tmp_path))
    (tmp_path / WEIGHTS).unlink()
    assert not set(before) & set(scope(write_adapter(tmp_path, **change)))


@pytest.mark.parametrize("fields", [{"name": "other"}, {"base_model_name": "base"}])
def test_another_name_or_base_gives_other_hashes(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_adapter(tmp_path)
    assert not set(scope(tmp_path)) & set(scope(tmp_path, **fields))


def test_weights_trained_again_are_told_apart_by_samples(tmp_path: Path) -> None:
    first, again = write_adapter(tmp_path / "1", weights=os.urandom(SIZE)), tmp_path / "2"
    write_adapter(again, weights=os.urandom(SIZE))
    assert compute_identity("a", "p", None, folder=first) != compute_identity("a", "p", None, folder=again)


@pytest.mark.parametrize("position", [0, SIZE - 1])
def test_both_ends_of_the_weights_are_looked_at(tmp_path: Path, position: int) -> None:
    weights = bytearray(SIZE)
    first = write_adapter(tmp_path / "1", weights=bytes(weights))
    weights[position] = 1
    other = write_adapter(tmp_path / "2", weights=bytes(weights))
    assert compute_identity("a", "p", None, folder=first) != compute_identity("a", "p", None, folder=other)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("org/adapter", "has no adapter_config.json in 'org/adapter': give its path as a local folder")],
)
def test_an_adapter_that_is_no_local_folder_is_one_sentence(path: str, reason: str) -> None:
    with pytest.raises(AdapterError, match=reason):
        compute_identity("adapter", path, None)


def test_an_adapter_that_cannot_be_identified_is_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters(LOG)
    for _ in range(3):
        assert adapters.scope(HASHES, request_for(tmp_path)) == []
    assert len(caplog.records) == 1


def test_an_adapter_loaded_in_place_is_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert scope(write_adapter(tmp_path), load_inplace=True) == []
    assert "load it without load_inplace" in caplog.text


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS, "adapter_model.bin"])
def test_files_that_change_under_a_known_adapter_end_the_sharing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    adapters, request = Adapters(LOG), request_for(write_adapter(tmp_path))
    assert adapters.scope(HASHES, request)
    (tmp_path / file).write_bytes(b"other")
    for _ in range(3):
        assert adapters.scope(HASHES, request) == []
    [record] = caplog.records
    assert record.getMessage() == (
        f"the files of adapter 'adapter' in '{tmp_path}' have changed: its KV is not shared any more; load it under a "
        "new path or restart the engine"
    )
    other = request_for(write_adapter(tmp_path / "new"), number=2)
    assert adapters.scope(HASHES, other)


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    adapters = Adapters(LOG)
    write_adapter(tmp_path)
    for number in range(MAXIMUM_ADAPTERS + 5):
        adapters.scope(HASHES, request_for(tmp_path, number=number))
    assert len(adapters._known) == MAXIMUM_ADAPTERS


identities = st.binary(min_size=32, max_size=32)


@given(identities, identities, st.binary(min_size=8, max_size=32), st.binary(min_size=8, max_size=32))
def test_scopes_do_not_meet(first: bytes, second: bytes, content: bytes, other: bytes) -> None:
    equal = (first, content) == (second, other)
    assert (scope_hashes([content], first) == scope_hashes([other], second)) is equal
