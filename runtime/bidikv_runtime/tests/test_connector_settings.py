"""Settings and sources: defaults, units, and one sentence for what is wrong."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime import contract
from bidikv_runtime.connector.settings import SettingsError, parse_settings
from bidikv_runtime.connector.sources import MAXIMUM_SOURCES, Source, SourcesError, parse_sources


def test_what_the_operator_writes_is_accepted() -> None:
    extra = contract.kv_transfer_config(fabric="TCP", lookup_port=5701)["kv_connector_extra_config"]
    settings = parse_settings(extra, {contract.ENV_LOOKUP_HOST: "10.0.0.7"}, "localhost")
    assert (settings.lookup_host, settings.lookup_port) == ("10.0.0.7", 5701)


def test_defaults() -> None:
    settings = parse_settings({}, {}, "10.1.1.1")
    assert settings.lookup_host == "10.1.1.1"
    assert settings.lookup_port == contract.LOOKUP_PORT
    assert settings.progress_delay_us == 5000


def test_milliseconds_become_seconds() -> None:
    settings = parse_settings({"bidikv_lookup_deadline_ms": 250, "bidikv_silent_period_seconds": 5}, {}, "h")
    assert settings.lookup_deadline == pytest.approx(0.25)
    assert settings.silent_period == 5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"bidikv_lookup_prot": 1}, "unknown key 'bidikv_lookup_prot': use one of .*bidikv_lookup_port"),
        ({"bidikv_lookup_port": 0}, "bidikv_lookup_port is 0: set it to a whole number from 1 to 65535"),
        ({"bidikv_lookup_port": 70000}, "is 70000"),
        ({"bidikv_lookup_port": "5700"}, "is '5700': set it to a whole number"),
        ({"bidikv_lookup_port": True}, "is True"),
        ({"bidikv_lookup_port": 5700.5}, "is 5700.5: set it to a whole number"),
        ({"bidikv_lookup_deadline_ms": -1}, "bidikv_lookup_deadline_ms is -1: set it to a number from 1 to 10000"),
        ({"bidikv_lookup_deadline_ms": float("nan")}, "is nan"),
        ({"bidikv_progress_delay_us": None}, "is None"),
    ],
)
def test_wrong_settings_name_key_and_remedy(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings(extra, {}, "h")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:5700"], (Source("10.0.0.1", 5700),)),
        (["10.0.0.1:1", "10.0.0.2:65535"], (Source("10.0.0.1", 1), Source("10.0.0.2", 65535))),
        (["[fd00::1]:5700"], (Source("fd00::1", 5700),)),
        (["10.0.0.1:1", "10.0.0.1:1"], (Source("10.0.0.1", 1),)),
        ([], ()),
    ],
)
def test_sources_are_parsed(value: list[str], expected: tuple[Source, ...]) -> None:
    assert parse_sources({contract.SOURCES_PARAM: value}) == expected


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}])
def test_requests_without_sources_have_none(params: dict[str, Any] | None) -> None:
    assert parse_sources(params) == ()


@pytest.mark.parametrize(
    "value",
    [
        "10.0.0.1:5700",
        ["decode-0.demo.svc:5700"],
        ["0.0.0.0:5700"],
        ["224.0.0.1:5700"],
        ["10.0.0.256:5700"],
        5,
        None,
        {"host": "a"},
        ["10.0.0.1"],
        ["10.0.0.1:"],
        [":1"],
        ["10.0.0.1:0"],
        ["10.0.0.1:65536"],
        ["10.0.0.1:1:2"],
        ["fd00::1"],
        ["10.0.0.1 2:1"],
        ["*:1"],
        ["tcp://a:1"],
        ["eth0;a:1"],
        ["10.0.0.1:1\n"],
        ["10.0.0.1:+1"],
        ["10.0.0.1:١"],
        [7],
        [None],
        [["10.0.0.1:1"]],
    ],
)
def test_bad_sources_are_refused(value: Any) -> None:
    with pytest.raises(SourcesError, match=contract.SOURCES_PARAM):
        parse_sources({contract.SOURCES_PARAM: value})


@pytest.mark.parametrize("params", [contract.SOURCES_PARAM, [contract.SOURCES_PARAM], 5, 2.5, True])
def test_params_that_are_no_object_are_refused(params: Any) -> None:
    with pytest.raises(SourcesError, match=f"{contract.KV_TRANSFER_PARAMS} is a {type(params).__name__}"):
        parse_sources(params)


def test_more_sources_than_the_limit_are_not_asked() -> None:
    sources = parse_sources({contract.SOURCES_PARAM: [f"10.0.0.1:{port}" for port in range(1, 100)]})
    assert len(sources) == MAXIMUM_SOURCES


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json)
def test_anything_over_the_api_is_parsed_or_refused(value: Any) -> None:
    try:
        sources = parse_sources({contract.SOURCES_PARAM: value})
    except SourcesError:
        return
    assert all(source.host and 0 < source.port < 65536 for source in sources)


def test_ipv6_addresses_are_written_with_brackets() -> None:
    assert str(Source("fd00::1", 1)) == "[fd00::1]:1"
    assert str(Source("10.0.0.1", 1)) == "10.0.0.1:1"
