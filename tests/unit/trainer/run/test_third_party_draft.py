"""Drafts and engines of third parties: which method serves a draft, and who checks an export."""

import importlib
import json
import logging
import sys

import pytest
import torch
from safetensors.torch import save_file

from spec_backend_cpu.backend import CpuBackend
from spec_core import Draft, EngineContext, plugins
from spec_core.errors import ArtifactError, RunError
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_engine_vllm.arguments import engine_arguments
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.drafting import recognise
from spec_trainer.run.draft_folder import check_export
from spec_trainer.run.serving import serving_commands

from ....distributions import write_distribution

COUSIN = """
from spec_core import Draft
from spec_kit.drafting import architectures, read_config


class CousinDraft(Draft):
    '''One that vLLM drafts with as with Eagle3, by a model class of its authors.'''

    name = "cousin"
    api_version = 1
    serving_methods = {"vllm": "eagle3"}

    @classmethod
    def from_folder(cls, folder):
        fields = read_config(folder) or {}
        found = "CousinForCausalLM" in architectures(fields)
        return cls(cls.Config(name="cousin", init_from=folder)) if found else None

    def check_target(self, target): ...
    def required_features(self, target): ...
    def denominators(self, supervision): ...
    def build(self, target, tensors, token_counts): ...
    def exported_config(self, target): ...
    def exported_tensors(self, weights, target): ...
    def proposer(self, module, ops): ...
"""
PICKY = """
from spec_core import Engine, Serving
from spec_core.errors import ArtifactError, EngineError


class PickyServing(Serving):
    def check_export(self, target, draft, folder):
        raise FAILURE

    def availability(self, target, draft): ...
    def command(self, target, draft, folder, num_draft_tokens): ...


class PickyEngine(Engine):
    name = "picky"
    api_version = 1
    serving = PickyServing()

    def start(self, schema): ...
    def capture(self, requests, schema): ...
    def generate_unordered(self, next_request, sampling): ...
    def load_draft(self, folder): ...
    def acceptance(self): ...
    def health(self): ...
    def close(self): ...
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(kind, name, class_name, source)``: a distribution with one module and one entry point."""
    site, modules = tmp_path / "site", []

    def make(kind, name, class_name, source):
        points = f"[spec_core.{kind}]\n{name} = {name}_plugin:{class_name}\n"
        write_distribution(site, f"{name}-plugin", points)
        if source is not None:
            (site / f"{name}_plugin.py").write_text(source)
        modules.append(f"{name}_plugin")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(site)
    yield make
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def cousin(install, tmp_path):
    """Folder of a third party's draft, in a format of its own."""
    install("drafts", "cousin", "CousinDraft", COUSIN)
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["CousinForCausalLM"]}))
    save_file({"model.fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    return folder


def started_with(target, folder, **config):
    """The ``speculative_config`` that vLLM would be started with."""
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with VllmEngine.create(VllmConfig(**config), target, context) as engine:
        engine.load_draft(folder)
        mode = engine._decoding_mode(3)
        return engine_arguments(engine.config, target, context, mode)["speculative_config"]


def test_vllm_serves_a_third_partys_draft_by_the_method_that_it_names(target, cousin):
    expected = {"method": "eagle3", "model": str(cousin), "num_speculative_tokens": 3}
    assert started_with(target, cousin) == expected
    assert started_with(target, cousin, draft_method="mine") == expected | {"method": "mine"}


def test_an_engine_that_a_draft_does_not_name_refuses_it_before_anything_starts(target, cousin):
    draft = recognise(cousin, target)
    VllmEngine.check_draft(VllmConfig(), target, draft, cousin, 3)
    with pytest.raises(ArtifactError, match=r"plugin 'cousin' names no method of this engine; .* name vllm$"):
        SglangEngine.check_draft(SglangConfig(), target, draft, cousin, 3)


def test_an_export_of_a_third_party_is_checked_by_the_engines_that_it_names(target, cousin):
    check_export(recognise(cousin, target), cousin, target)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ('ArtifactError("it is not picky enough")', "it is not picky enough"),
        ('EngineError("no card")', "no card"),
        ('KeyError("layers")', "KeyError: 'layers'"),
        ('OSError(2, "No such file")', "No such file"),
        ('Exception("two\\nlines")', "Exception: two"),
        ("SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_an_engine_that_the_draft_names_refuses_its_export(install, target, cousin, monkeypatch, error, said):
    install("engines", "picky", "PickyEngine", PICKY.replace("FAILURE", error))
    draft = recognise(cousin, target)
    monkeypatch.setattr(type(draft), "serving_methods", {"picky": "mine"})
    line = f"the cousin draft was exported and fails the check: engine 'picky' (picky-plugin 1.0): {said}"
    with pytest.raises(RunError) as caught:
        check_export(draft, cousin, target)
    assert str(caught.value) == line


def test_an_engine_that_the_draft_does_not_name_is_not_even_imported(install, target, cousin):
    install("engines", "heavy", "HeavyEngine", "raise KeyboardInterrupt")
    draft = recognise(cousin, target)
    check_export(draft, cousin, target)
    assert serving_commands(target, draft, cousin, 2).keys() == {"vllm"}
    assert "heavy_plugin" not in sys.modules


@pytest.mark.parametrize(
    ("statement", "said"), [("return {}['x']", "KeyError: 'x'"), ("raise SystemExit(0)", "SystemExit: 0")]
)
def test_a_draft_plugin_that_fails_on_a_folder_does_not_hide_the_right_one(
    install, target, cousin, statement, said
):
    broken = COUSIN.replace("cousin", "another").replace("fields = read_config(folder) or {}", statement)
    install("drafts", "another", "CousinDraft", broken)
    assert recognise(cousin, target).name == "cousin"
    (cousin / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    with pytest.raises(ArtifactError, match=rf"another \(its plugin another-plugin 1.0 failed: {said}\)"):
        recognise(cousin, target)


def test_a_broken_engine_does_not_stop_an_export(install, target, cousin, caplog, monkeypatch):
    install("engines", "broken", "BrokenEngine", None)
    draft = recognise(cousin, target)
    monkeypatch.setattr(type(draft), "serving_methods", {"broken": "mine"})
    with caplog.at_level(logging.WARNING):
        check_export(draft, cousin, target)
    assert "the export is not checked for engine broken" in caplog.text


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_our_drafts_name_a_method_of_every_engine_that_serves_exports(name):
    assert plugins.load(Draft, name).serving_methods.keys() == {"vllm", "sglang", "llamacpp"}
