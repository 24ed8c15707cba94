"""An unforeseen error is attributed to the plugin whose code raised it, and to no other."""

import json
import sys
from textwrap import dedent

import pytest

from spec_core.errors import EngineError
from spec_core.plugin_faults import raised_in

from ...distributions import write_distribution

APPLICATION = "host_application"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(module, source, *names)``: a distribution with drafts called ``names``; returns its module."""

    def install(module: str, source: str, *names: str):
        points = "".join(f"{name} = {module}:Draft\n" for name in names)
        write_distribution(tmp_path, module, f"[spec_core.drafts]\n{points}", "3.1")
        return write(module, source)

    def write(module: str, source: str):
        (tmp_path / f"{module}.py").write_text(dedent(source))
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        return __import__(module)

    install.write = write
    return install


def told(call, *arguments) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011 (any error may be a plugin's)
        call(*arguments)
    return raised_in(raised.value, APPLICATION)


def test_the_plugin_whose_code_raises_is_named_with_its_distribution(installed):
    planted = installed("planted", "def build(): return {}['layers']\n", "tree")
    assert told(planted.build) == ", raised in draft 'tree' of planted 3.1"


def test_a_library_that_a_plugin_calls_wrongly_is_skipped(installed):
    planted = installed("planted", "import json\ndef build(): return json.loads('{')\n", "tree")
    assert told(planted.build) == ", raised in draft 'tree' of planted 3.1"
    assert told(json.loads, "{") == ""


def test_the_innermost_of_two_plugins_is_named(installed):
    planted = installed("planted", "def call(function): return function()\n", "tree")
    other = installed("other", "def fail(): return 1 / 0\n", "bush")
    assert told(planted.call, other.fail) == ", raised in draft 'bush' of other 3.1"


def test_an_error_of_the_application_below_a_plugin_is_the_applications(installed):
    """A launcher calls the worker's code, for one."""
    planted = installed("planted", "def call(function): return function()\n", "tree")
    application = installed.write(APPLICATION, "def fail(): return 1 / 0\n")
    assert told(planted.call, application.fail) == ""


def test_a_package_of_several_plugins_is_named_by_its_distribution(installed):
    planted = installed("planted", "def build(): return 1 / 0\n", "tree", "bush")
    assert told(planted.build) == ", raised in a plugin of planted 3.1"


def test_an_error_that_a_plugin_raises_for_the_user_speaks_for_itself(installed):
    source = "from spec_core.errors import EngineError\ndef fail(): raise EngineError('no room')\n"
    planted = installed("planted", source, "tree")
    with pytest.raises(EngineError) as raised:
        planted.fail()
    assert raised_in(raised.value, APPLICATION) == ""
