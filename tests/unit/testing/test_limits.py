"""Suites wait longer where that is asked for."""

import pytest

from spec_core.errors import ConfigError
from spec_testing.limits import patient


def test_a_limit_is_multiplied(monkeypatch):
    monkeypatch.delenv("SPEC_TESTING_PATIENCE", raising=False)
    assert patient(30.0) == 30.0
    monkeypatch.setenv("SPEC_TESTING_PATIENCE", "2.5")
    assert patient(30.0) == 75.0


@pytest.mark.parametrize("text", ["", "many", "0", "0.5", "-1", "nan", "inf"])
def test_what_is_no_factor_is_refused(monkeypatch, text):
    monkeypatch.setenv("SPEC_TESTING_PATIENCE", text)
    with pytest.raises(ConfigError, match="expected by how much to multiply the limits, 1 or more"):
        patient(30.0)
