"""The configuration, its variable or file, and the command line: what is accepted, and the sentence for what is not."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bidikv_runtime.contract import ENV_ROUTER_CONFIG, RouterConfig
from bidikv_runtime.router.__main__ import main, parse_settings
from bidikv_runtime.router.config import ConfigError, choose_config, load_config, parse_config

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
        (replace(CONFIG, state_port=-1).to_json(), "f: state_port is -1; give a port from 1 to 65535, or 0"),
        (replace(CONFIG, local_limit_tokens=-1).to_json(), "f: local_limit_tokens is -1; give a number of at least 0"),
        (replace(CONFIG, trace_ratio=1.5).to_json(), "f: trace_ratio is 1.5; give a number from 0 to 1"),
        (
            replace(CONFIG, trace_endpoint="collector:4318").to_json(),
            "f: trace_endpoint is 'collector:4318'; give a URL",
        ),
        (replace(CONFIG, trace_endpoint="http://c:x/").to_json(), "f: trace_endpoint is 'http://c:x/'; give a URL"),
        (CONFIG.to_json().replace('"access_log": false', '"access_log": "yes"'), r"f: .*`bool`.*\$\.access_log"),
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


def test_where_the_configuration_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    path.write_text(replace(CONFIG, source_count=7).to_json())
    environment = {ENV_ROUTER_CONFIG: CONFIG.to_json()}
    assert choose_config(None, environment, is_static=False) == CONFIG
    assert choose_config(None, environment, is_static=True) == CONFIG
    assert choose_config(path, environment, is_static=False).source_count == 7
    assert choose_config(None, {}, is_static=True).namespace == ""
    with pytest.raises(ConfigError, match="there is no configuration; set BIDIKV_ROUTER_CONFIG"):
        choose_config(None, {}, is_static=False)
    with pytest.raises(ConfigError, match=r"BIDIKV_ROUTER_CONFIG: .*truncated"):
        choose_config(None, {ENV_ROUTER_CONFIG: "{"}, is_static=False)


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


STATIC = ["--static-prefill", "a:1", "--static-decode", "b:1"]


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ([], {}),
        (["--local-limit-tokens", "0"], {"local_limit_tokens": 0}),
        (["--access-log", "--debug"], {"access_log": True, "debug": True}),
        (["--no-continue-streams"], {"continue_streams": False}),
        (["--reuse", "OneWay", "--missing-prefill", "Fail"], {"reuse": "OneWay", "missing_prefill": "Fail"}),
        (
            ["--trace-endpoint", "https://c/v1/traces", "--trace-ratio", "0.25"],
            {"trace_endpoint": "https://c/v1/traces", "trace_ratio": 0.25},
        ),
        (
            ["--state-port", "0", "--source-count", "3", "--tls-dir", "/tls"],
            {"state_port": 0, "source_count": 3, "tls_dir": "/tls"},
        ),
    ],
)
def test_flags_override_the_file(flags: list[str], values: dict[str, object], tmp_path: Path) -> None:
    written = replace(CONFIG, continue_streams=True, local_limit_tokens=100)
    path = tmp_path / "router.json"
    path.write_text(written.to_json())
    assert parse_settings(["--config", str(path), *STATIC, *flags]).config == replace(written, **values)  # type: ignore[arg-type]


def test_what_names_nothing_of_the_cluster_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = {"namespace", "prefill_service", "decode_service", "served_model_name", "engine_port", "lookup_port"}
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    text = capsys.readouterr().out
    for item in fields(RouterConfig):
        if item.name != "version":
            flag = f"--{item.name.replace('_', '-')}"
            assert (re.search(rf"{flag}\b", text) is None) == (item.name in cluster), flag


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*STATIC, "--trace-ratio", "nan"], "--trace-ratio is nan; give a number from 0 to 1"),
        ([*STATIC, "--source-count", "-1"], "--source-count is -1; give a number of at least 0"),
        ([*STATIC, "--queue-seconds", "-1"], "--queue-seconds is -1.0; give a number of at least 0"),
        ([*STATIC, "--queue-seconds", "nan"], "--queue-seconds is nan; give a number of at least 0"),
        (["--static-prefill", "a:1"], "static mode needs at least one engine in"),
        (["--static-prefill", "a", "--static-decode", "b:1"], "the static engine 'a' is not host:port"),
        (["--static-prefill", "a:1", "--static-decode", "b:1", "--max-in-flight", "-1"], "--max-in-flight is -1"),
        (["--config", "/nowhere/router.json"], "/nowhere/router.json: cannot be read"),
        ([], "there is no configuration; set BIDIKV_ROUTER_CONFIG, give --config, or name static engines"),
    ],
)
def test_usage_errors_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bidikv-router: ")
    assert sentence in error
    assert error.count("\n") == 1
