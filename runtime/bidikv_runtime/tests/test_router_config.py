"""The configuration file and the command line: what is accepted, and the sentence for what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.__main__ import main, parse_settings
from bidikv_runtime.router.config import ConfigError, load_config, parse_config

CONFIG = RouterConfig(namespace="ns", prefill_service="p", decode_service="d", served_model_name="m")


def test_what_the_operator_writes_is_what_the_router_reads(tmp_path: Path) -> None:
    written = replace(CONFIG, reuse="OneWay", source_count=3, engine_port=8001, lookup_port=5701)
    path = tmp_path / "router.json"
    path.write_text(written.to_json())
    assert load_config(path) == written


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "f: .*truncated"),
        ('{"namespace": "ns"}', "f: .*prefill_service"),
        (replace(CONFIG, version=2).to_json(), "f: version 2 is not supported"),
        (replace(CONFIG, source_count=-1).to_json(), "f: source_count is -1"),
        (replace(CONFIG, engine_port=0).to_json(), "f: engine_port is 0"),
        (replace(CONFIG, lookup_port=65536).to_json(), "f: lookup_port is 65536"),
        (CONFIG.to_json().replace("Bidirectional", "Sideways"), r"f: .*Sideways.*\$\.reuse"),
        (CONFIG.to_json().replace('"ns"', "5"), r"f: .*\$\.namespace"),
    ],
)
def test_wrong_configurations(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(text.encode(), "f")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/router\.json: cannot be read"):
        load_config(Path("/nowhere/router.json"))


def test_static_engines_need_no_file() -> None:
    settings = parse_settings(
        ["--static-prefill", "10.0.0.1:8000", "--static-decode", "10.0.0.2:8000@5705", "--max-body-bytes", "10"]
    )
    assert settings.static is not None
    assert [e.lookup for e in settings.static.decode] == ["10.0.0.2:5705"]
    assert settings.config.reuse == "Bidirectional"
    assert settings.limits.max_body_bytes == 10
    assert settings.limits.prefill_seconds == 600.0


def test_static_engines_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    path.write_text(replace(CONFIG, reuse="OneWay", lookup_port=5999).to_json())
    settings = parse_settings(["--config", str(path), "--static-prefill", "a:1", "--static-decode", "b:2"])
    assert settings.static is not None
    assert settings.static.decode[0].lookup == "b:5999"
    assert settings.config.reuse == "OneWay"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--static-prefill", "a:1"], "static mode needs at least one engine in"),
        (["--static-prefill", "a", "--static-decode", "b:1"], "the static engine 'a' is not host:port"),
        (["--static-prefill", "a:1", "--static-decode", "b:1", "--max-in-flight", "-1"], "--max-in-flight is -1"),
        (["--config", "/nowhere/router.json"], "/nowhere/router.json: cannot be read"),
    ],
)
def test_usage_errors_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bidikv-router: ")
    assert sentence in error
    assert error.count("\n") == 1
