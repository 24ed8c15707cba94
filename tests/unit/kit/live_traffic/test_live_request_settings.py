"""The environment variable by which a server is asked to keep requests."""

import json

import pytest

from spec_core.errors import ConfigError
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE, LiveRequests


def test_nothing_is_kept_unless_the_environment_asks_for_it(monkeypatch) -> None:
    monkeypatch.delenv(LIVE_REQUESTS_VARIABLE, raising=False)
    assert LiveRequests.from_environment() is None
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 0.5, "opt_in": true}')
    assert LiveRequests.from_environment() is not None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0.1", "is no JSON object; expected such as"),
        ("{", "is no JSON object"),
        ('{"share": 0}', "share=0"),
        ('{"share": 1.5}', "share=1.5"),
        ("{}", "share"),
        ('{"share": 1, "optin": true}', "did you mean 'opt_in'"),
        ('{"share": 1, "labels": ["a b"]}', "labels"),
        ('{"share": 1, "labels": ["ok\\n"]}', "labels"),
        (json.dumps({"share": 1, "labels": ["x" * 65]}), "labels"),
        (json.dumps({"share": 1, "labels": [f"l{number}" for number in range(17)]}), "labels"),
    ],
)
def test_a_wrong_value_is_refused(monkeypatch, value, problem) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, value)
    with pytest.raises(ConfigError, match="SPEC_LIVE_REQUESTS") as error:
        LiveRequests.from_environment()
    assert problem in str(error.value)
