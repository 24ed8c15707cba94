"""The status of each plugin that is installed."""

from textwrap import dedent

import pytest

from spec_core import Backend, plugins

from .conftest import GOOD


@pytest.mark.parametrize(
    ("source", "status", "reason", "api"),
    [
        (GOOD, "ok", "", 1),
        (GOOD + "        probe = classmethod(lambda cls: UNAVAILABLE)\n", "unavailable", "no device", 1),
        (
            GOOD + "        probe = classmethod(lambda cls: 1 / 0)\n",
            "broken",
            "probe raised ZeroDivisionError",
            None,
        ),
        (GOOD + "        api_version = 7\n", "broken", "version 7 of spec_core.Backend", None),
        ("1 / 0", "broken", "ZeroDivisionError", None),
    ],
)
def test_status_never_raises(install, source, status, reason, api):
    no_device = "UNAVAILABLE = Availability(ok=False, reason='no device')\n"
    install("spec-planted", "from spec_core.records import Availability\n" + no_device + dedent(source))
    found = plugins.status(plugins.find(Backend, "planted"))
    assert found[0] == status
    assert reason in found[1]
    assert found[2] == api


def test_status_of_both_sides_of_a_conflict_is_broken(install):
    install("spec-planted")
    install("another-planted")
    records = [record for record in plugins.installed(Backend) if record.name == "planted"]
    assert {record.distribution for record in records} == {"spec-planted", "another-planted"}
    for record in records:
        status, reason, _ = plugins.status(record)
        assert status == "broken"
        assert "uninstall one of them" in reason
