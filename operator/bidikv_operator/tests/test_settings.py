"""Settings from the environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bidikv_operator import settings as module
from bidikv_operator.settings import Settings, SettingsError, read_settings

IMAGE = {"BIDIKV_RUNTIME_IMAGE": "i:1"}


def test_defaults_are_those_of_the_class() -> None:
    found = read_settings(IMAGE)
    expected = Settings(runtime_image="i:1", identity=found.identity, lease_namespace=found.lease_namespace)
    assert found == expected
    assert found.identity


def test_values_are_read() -> None:
    found = read_settings(
        {**IMAGE, "BIDIKV_NAMESPACES": " b, a,,a ", "BIDIKV_WORKERS": "9", "BIDIKV_LOG_LEVEL": "debug"}
    )
    assert (found.namespaces, found.workers, found.log_level) == (("a", "b"), 9, "DEBUG")


def test_empty_is_unset() -> None:
    found = read_settings({**IMAGE, "BIDIKV_NAMESPACES": "", "BIDIKV_HTTP_PORT": "", "BIDIKV_LEASE_NAME": ""})
    assert (found.namespaces, found.http_port, found.lease_name) == ((), 8080, "bidikv-operator")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "BIDIKV_RUNTIME_IMAGE is not set"),
        ({"BIDIKV_RUNTIME_IMAGE": ""}, "BIDIKV_RUNTIME_IMAGE is not set"),
        ({**IMAGE, "BIDIKV_HTTP_PORT": "x"}, "BIDIKV_HTTP_PORT is 'x'; set it to a whole number"),
        ({**IMAGE, "BIDIKV_HTTP_PORT": "70000"}, "BIDIKV_HTTP_PORT is 70000; set it to between 0 and 65535"),
        ({**IMAGE, "BIDIKV_LOG_LEVEL": "LOUD"}, "BIDIKV_LOG_LEVEL is 'LOUD'; set it to one of DEBUG"),
        ({**IMAGE, "BIDIKV_RENEW_DEADLINE_SECONDS": "20"}, "must hold"),
        ({**IMAGE, "BIDIKV_WRITE_TIMEOUT_SECONDS": "6"}, "must not exceed BIDIKV_LEASE_SECONDS"),
    ],
)
def test_mistakes_name_the_variable_and_the_remedy(environ: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        read_settings(environ)


def test_every_setting_is_documented_by_its_variable() -> None:
    source = Path(module.__file__).read_text()
    for field in dataclasses.fields(Settings):
        assert f'"""BIDIKV_{field.name.upper()}' in source, field.name
