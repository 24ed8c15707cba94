"""Runs with the plugins of third parties, in a clean environment that has the wheels."""

import json
import os
from pathlib import Path

import pytest

from ..distributions import write_distribution

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def test_a_third_partys_draft_trains(train, run, clean_python, tiny_llama, rows, losses_of, tmp_path):
    """Its options, losses, checkpoints and exports are a run's like any other's."""
    output = train("--draft", "medusa", "draft.num_heads=2", "train.steps=8", "train.lr=5e-3")
    losses = losses_of(output)
    assert losses[-1] < losses[0]
    fields = json.loads((output / "draft" / "config.json").read_text())
    assert (fields["architectures"], fields["num_heads"]) == (["MedusaModel"], 2)
    words = ["--target", tiny_llama, "--draft-model", output / "draft", "--prompts", rows, "--json"]
    measured = json.loads(run(clean_python.with_name("spec-trainer"), "evaluate", *words, cwd=tmp_path))
    assert measured["outputs_equal"]
    assert measured["drafted"] == 2 * measured["rounds"] > 0
    assert measured["acceptance_length"] == pytest.approx(1 + measured["accepted"] / measured["rounds"])


def test_a_run_asks_for_the_kernels_that_distributions_bring(run, clean_python, tiny_llama, rows, tmp_path):
    """A second kernel of the name of the third party's own is refused before training begins."""
    points = "[spec_core.kernels]\ncpu:medusa_residual = another_medusa:kernel\n"
    site = write_distribution(tmp_path / "site", "another-medusa", points)
    words = ["--target", tiny_llama, "--data", rows, "--draft", "medusa", "--output", tmp_path / "run"]
    command, env = clean_python.parent / "spec-trainer", {**os.environ, "PYTHONPATH": str(site)}
    with pytest.raises(
        AssertionError,
        match=r"kernel 'cpu:medusa_residual' is provided by another-medusa 1\.0 and spec-draft",
    ):
        run(command, *words, "train.steps=1", cwd=tmp_path, env=env)


LING_TARGET = """
import sys, torch, transformers
sys.path.append(sys.argv[1])
from test_ling import SIZES
config = transformers.AutoConfig.for_model("bailing_hybrid", **SIZES | {"vocab_size": 97})
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("target")
"""


def test_a_target_of_a_third_partys_type_is_trained_for(run, clean_python, rows, tmp_path):
    """`hf` compares the logits of the model's own code with the type's reading before it captures."""
    tests = ROOT / "tests/plugins/spec-target-type-ling/tests"
    run(clean_python, "-c", LING_TARGET, tests, cwd=tmp_path)
    words = ["--target", "target", "--data", rows, "--output", "run", "draft.layers=[1,2,3]", "train.steps=2"]
    run(clean_python.parent / "spec-trainer", *words, cwd=tmp_path)
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()


def test_a_draft_trains_on_the_features_of_a_third_partys_engine(train, losses_of):
    """The target runs in a process of the engine's own, which sends the features to the trainer's."""
    output = train("--engine", "remote", "engine.threads=1", "train.steps=8", "train.lr=5e-3")
    losses = losses_of(output)
    assert losses[-1] < losses[0]
    assert "the remote target is up" in (output / "logs" / "engine-0.log").read_text()


def test_a_third_partys_engine_trains_a_draft_and_speculates_with_it(
    train, run, clean_python, tiny_llama, rows, losses_of, tmp_path
):
    command, output = (
        clean_python.with_name("spec-trainer"),
        train("--engine", "serial", "train.steps=8", "train.lr=5e-3"),
    )
    losses = losses_of(output)
    assert losses[-1] < losses[0]
    words = ["--engine", "serial", "--target", tiny_llama, "--draft-model", output / "draft"]
    words += ["--prompts", rows, "--max-new-tokens", "16", "--json"]
    measured = json.loads(run(command, "evaluate", *words, cwd=tmp_path))
    assert measured["outputs_equal"]
    assert measured["acceptance_length"] == pytest.approx(1 + measured["accepted"] / measured["rounds"])
    with pytest.raises(
        AssertionError, match=r"engine\.most_guesses=2; raise it or lower the number of draft tokens"
    ):
        run(command, "evaluate", "engine.most_guesses=2", *words, cwd=tmp_path)
