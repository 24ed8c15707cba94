"""Training with products in fp8: gradients near those without, and runs that resume to the bit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spec_core import Draft, no_kernel, plugins
from spec_kit.layers import Fp8Layers, use_fp8_head
from spec_testing.draft_workbench import LENGTHS, Workbench, build
from spec_testing.toy_target import toy_batch, toy_target
from spec_trainer.cli.app import run

from ..fp8_on_cpus import needs_fp8
from .run_directory import losses

pytestmark = needs_fp8

BLOCKS = {"block_size": 4, "anchor_share": 1.0, "num_layers": 2, "num_features": 3}
DRAFTS: dict[str, dict[str, object]] = {
    "eagle3": {"num_steps": 3, "vocab_size": 48, "num_layers": 2, "checkpoint_activations": True},
    "dflash": BLOCKS,
    "dflash2": {**BLOCKS, "selector_rank": 16},
    "lilicorr": {**BLOCKS, "lilicorr_hidden_size": 16},
    "dspark": {**BLOCKS, "markov_rank": 16, "vocab_size": 48},
    "peagle": {"num_guesses": 3},
}


def built(name: str, folder: Path) -> Workbench:
    """Return a draft on a target whose sizes fp8 supports, and whose tokens are not almost certain."""
    plugin = plugins.load_available(Draft, name)
    draft = plugin(plugin.Config.model_validate({"name": name, **DRAFTS[name]}))
    bench = build(draft, toy_target(folder, vocab_size=112))
    bench.ops.head.weight.mul_(0.25)
    return bench


def trained_once(bench: Workbench) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one pass over documents."""
    samples = bench.samples(LENGTHS)
    output = bench.forward_backward([toy_batch(samples, bench.schema)], bench.denominators(samples))
    return output.loss.item(), bench.gradients()


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("fp8", ["frozen", "layers"])
def test_gradients_point_where_those_without_fp8_do(name, fp8, tmp_path):
    """Relative rounding errors are up to 2^-4 (e4m3) of states and weights, up to 2^-3 (e5m2) of gradients.

    The head's product is one of each, and roundings of many terms cancel in part. With layers, roundings of several
    products add up, so the bound is twice as large. Noise of 2 % on all weights alone gives 3 to 7 %.
    """
    loss, expected = trained_once(built(name, tmp_path))
    rounded, layers = built(name, tmp_path), Fp8Layers(no_kernel)
    if fp8 == "layers":
        rounded = rounded.with_kernels(layers.find)
        layers.attach(rounded.module)
    use_fp8_head(rounded.ops, no_kernel)
    other_loss, got = trained_once(rounded)
    assert other_loss != loss
    assert other_loss == pytest.approx(loss, rel=2**-4)
    flat, other = (torch.cat([grads[key].flatten() for key in sorted(grads)]) for grads in (expected, got))
    error = ((other - flat).norm() / flat.norm()).item()
    assert 2**-9 < error < (2**-3 if fp8 == "frozen" else 2**-2)


@pytest.fixture
def words(make_target: Callable[..., Path], rows_file: Path) -> Callable[..., list[str]]:
    """``words(output, *overrides)``: the command line of a run of 4 steps in fp8, a checkpoint after each two."""
    target = make_target("llama", vocab_size=112, initializer_range=0.6)

    def build(output: Path, *overrides: str, steps: int = 4) -> list[str]:
        flags = ["--target", str(target), "--data", str(rows_file), "--output", str(output)]
        keys = {"steps": steps, "lr": 3e-3, "warmup_steps": 2, "global_batch_tokens": 128, "save_every": 2}
        fixed = [f"train.{key}={value}" for key, value in keys.items()]
        return [*flags, *fixed, "train.dtype=bfloat16", *overrides]

    return build


# Layers have a state that is resumed; the target's head, which "frozen" leaves at that, has none.
@pytest.mark.parametrize(
    ("fp8", "name"),
    [
        pytest.param("frozen", "dflash", marks=pytest.mark.slow),
        ("layers", "eagle3"),
        pytest.param("layers", "dspark", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_as_one_without_a_break(words, tmp_path, fp8, name):
    options = [f"draft.name={name}", *(f"draft.{key}={value}" for key, value in DRAFTS[name].items())]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    chosen = [*options, f"train.fp8={fp8}"]
    assert run(words(whole, *chosen)) == 0
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-4")
    shutil.rmtree(resumed / "draft")
    assert run(words(resumed, *chosen)) == 0
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 4
    assert (resumed / "draft/model.safetensors").read_bytes() == (
        whole / "draft/model.safetensors"
    ).read_bytes()
    assert run(words(tmp_path / "without", *options, steps=1)) == 0
    assert losses(tmp_path / "without") != losses(whole)[:1]
