"""The rules by which settings are chosen."""

import math
import sys
from dataclasses import replace

import pytest

from spec_core import Backend, Draft, DraftConfig, Engine, EngineAbilities, EngineConfig
from spec_core.plugins import load, load_each
from spec_trainer.cli.target_quickstart import recipe
from spec_trainer.cli.target_quickstart.recipe import Machine

from .....distributions import write_distribution

CPU = Machine(backend="cpu", is_cpu=True, has_bfloat16=False)
GPU = Machine(backend="gpu", is_cpu=False, has_bfloat16=True)


@pytest.mark.parametrize(
    ("width", "rate"), [(32, 7e-3), (128, 7e-3), (576, 2e-3), (4096, 4e-4), (16384, 4e-4)]
)
def test_the_learning_rate_has_the_measured_values(width, rate):
    assert recipe.peak_rate(width) == rate


def test_between_them_the_learning_rate_falls_by_a_power_of_the_width():
    middle = round(math.sqrt(576 * 4096))
    assert recipe.peak_rate(middle) == pytest.approx(math.sqrt(2e-3 * 4e-4), rel=0.02)


@pytest.mark.parametrize(
    ("vocab_size", "is_cpu", "size"),
    [(16384, True, None), (49152, True, 8192), (49152, False, None), (100_000, False, 32000)],
)
def test_a_large_vocabulary_is_cut(vocab_size, is_cpu, size):
    assert recipe.vocabulary(vocab_size, is_cpu) == size


@pytest.mark.parametrize(
    ("budget_s", "is_cpu", "steps"), [(240, True, 3), (1200, True, 4), (600, False, 5), (7200, False, 7)]
)
def test_a_chain_is_longer_with_more_time(budget_s, is_cpu, steps):
    assert recipe.chain_steps(budget_s, is_cpu) == steps


@pytest.mark.parametrize(
    ("num_tokens", "is_cpu", "batch"),
    [(100, True, 512), (16000, True, 2000), (10**6, True, 3072), (10**6, False, 16384)],
)
def test_a_pass_over_the_data_has_several_steps(num_tokens, is_cpu, batch):
    assert recipe.batch_tokens(num_tokens, 600, is_cpu) == batch


@pytest.mark.parametrize(
    ("budget_s", "machine", "number"), [(60, CPU, 4), (1200, CPU, 20), (600, GPU, 60), (7200, GPU, 96)]
)
def test_more_prompts_are_held_out_where_an_answer_takes_less_time(budget_s, machine, number):
    assert recipe.prompts_held_out(budget_s, machine) == number


def test_an_answer_is_as_long_as_the_time_allows():
    assert recipe.answer_tokens(600, 0.1, 99, most=256) == 256
    assert recipe.answer_tokens(60, 0.1, 99, most=256) < recipe.answer_tokens(60, 0.1, 9, most=256) < 256
    assert recipe.answer_tokens(1, 0.1, 99, most=256) == 24
    assert recipe.answer_tokens(1, 0.1, 99, most=10) == 10


class _Plain:
    Config = DraftConfig


class _Engine:
    Config = EngineConfig
    abilities = EngineAbilities()


def test_a_plugin_gets_no_option_that_it_does_not_have(tiny_llama):
    from spec_kit.targets.target_reader import read_target

    target = read_target(tiny_llama)
    assert recipe.draft_options(_Plain, target, CPU, 60) == {}
    assert recipe.draft_options(load(Draft, "eagle3"), target, CPU, 60) == {"num_steps": 3}
    assert recipe.engine_words(_Engine, CPU) == []
    assert recipe.engine_words(load(Engine, "hf"), CPU) == ["engine.max_num_seqs=8", "engine.dtype=float32"]
    assert recipe.engine_words(load(Engine, "hf"), GPU) == ["engine.batch_tokens=32768"]
    assert recipe.engine_words(_Engine, GPU) == []


def test_an_option_that_costs_the_draft_an_engine_is_left_out(tiny_llama):
    """SGLang serves no block draft with a reduced vocabulary."""
    from spec_kit.targets.target_reader import read_target

    target = replace(read_target(tiny_llama), vocab_size=49152)
    assert recipe.draft_options(load(Draft, "eagle3"), target, CPU, 60) == {
        "vocab_size": 8192,
        "num_steps": 3,
    }
    assert recipe.draft_options(load(Draft, "dflash"), target, CPU, 60) == {}


def test_training_is_in_bfloat16_where_it_is_faster(tiny_llama):
    from spec_kit.targets.target_reader import read_target

    target = read_target(tiny_llama)
    assert "train.dtype=float32" in recipe.training_words(target, CPU, 1000, 60)
    assert "train.dtype=bfloat16" in recipe.training_words(target, GPU, 1000, 60)


def test_a_machine_without_other_devices_is_a_cpu():
    machine = recipe.look_at_machine("cpu")
    assert (machine.backend, machine.is_cpu) == ("cpu", True)


@pytest.mark.parametrize("method", ["probe", "capabilities"])
def test_a_strangers_broken_backend_is_passed_over(tmp_path, monkeypatch, method):
    source = f"""
from spec_backend_cpu.backend import CpuBackend

class Ailing(CpuBackend):
    name, device_type = "ailing", "xpu"

    @classmethod
    def {method}(cls):
        raise RuntimeError("no driver")
"""
    (tmp_path / "ailing.py").write_text(source)
    write_distribution(tmp_path, "ailing", "[spec_core.backends]\nailing = ailing:Ailing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ailing", raising=False)
    assert "ailing" in [name for name, _ in load_each(Backend)]
    assert recipe.look_at_machine(None).backend == "cpu"
