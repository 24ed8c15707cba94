"""Fixtures of the tests of a run's exports."""

import pytest
from tests.unit.trainer.run.edited_exports import OPTIONS

from spec_core import Draft, plugins
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.commands.evaluate import export_untrained


@pytest.fixture
def target(tiny_llama):
    return read_target(tiny_llama)


@pytest.fixture
def export(target, tmp_path):
    def make(case):
        plugin = plugins.load(Draft, case.partition(",")[0])
        draft = plugin(plugin.Config(name=plugin.name, **OPTIONS[case]))
        return export_untrained(draft, target, tmp_path / "draft")

    return make
