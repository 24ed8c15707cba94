"""Each draft folder has a model card: README.md says what the draft is, and names nothing of this machine."""

import json
import shutil

import pytest
import yaml

from spec_trainer.cli.app import run

from . import run_directory
from .foreign_layouts import as_specforge


@pytest.fixture(scope="module")
def hub_target(peaked_target, tmp_path_factory):
    """A target in a folder as the hub's client makes it."""
    snapshots = tmp_path_factory.mktemp("cache") / "models--Some-Lab--Tiny-1" / "snapshots"
    return shutil.copytree(peaked_target, snapshots / "0123abcd")


@pytest.fixture(scope="module")
def trained(hub_target, rows_file, tmp_path_factory):
    """A run of four steps with a checkpoint after two."""
    output = tmp_path_factory.mktemp("trained") / "run"
    words = [
        "--target", hub_target, "--data", rows_file, "--output", output, "train.steps=4", "train.save_every=2",
        "train.global_batch_tokens=128", "train.lr=0.003", "draft.num_steps=2", "draft.vocab_size=40",
    ]  # fmt: skip
    assert run([str(word) for word in words]) == 0
    return output


@pytest.fixture
def draft(trained, tmp_path):
    return shutil.copytree(trained / "draft", tmp_path / "draft")


def card_of(folder) -> tuple[dict, str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_what_was_trained_and_how_to_serve_it(trained, tmp_path_factory):
    front, text = card_of(trained / "draft")
    assert front == {
        "base_model": "Some-Lab/Tiny-1",
        "library_name": "spec-trainer",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "sglang", "vllm"],
    }
    summary = run_directory.summary(trained)
    for line in (
        "# eagle3 draft for Some-Lab/Tiny-1",
        "| target | LlamaForCausalLM, 8 layers of width 32 |",
        "| kind | eagle3 |",
        "| layers | 1 |",
        "| vocabulary | 40 of the target's 97 tokens |",
        "vllm serve Some-Lab/Tiny-1 --speculative-config "
        """'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 2}'""",
        "| steps | 4 |",
        f"| tokens trained | {summary['tokens']:,} |",
        "| samples of the data | 40 |",
        f"| tokens a pass (τ), simulated on held-out data | {summary['eval_acceptance_length']:.2f} |",
        "  vocab_size: 40",
        "  lr: 0.003",
    ):
        assert line in text.splitlines()
    assert str(tmp_path_factory.getbasetemp()) not in text
    assert (trained / "draft" / "README.md").stat().st_mode & 0o777 == (
        trained / "draft" / "config.json"
    ).stat().st_mode & 0o777


def test_an_exported_checkpoint_has_the_figures_of_its_own_step(command_line, trained, tmp_path):
    words = ("export", "--checkpoint", trained / "checkpoints" / "step-2", "--output", tmp_path / "draft")
    assert command_line(*words).code == 0
    _, text = card_of(tmp_path / "draft")
    assert "| steps | 2 |" in text
    assert "tokens trained" not in text  # the run's summary is of step 4
    assert "  lr: 0.003" in text.splitlines()


def test_an_evaluation_is_added_to_the_card_and_replaced_by_the_next(
    command_line, draft, hub_target, rows_file
):
    (draft / "README.md").write_text(
        card_of_training := (draft / "README.md").read_text() + "\n## Licence\n\nMIT\n"
    )
    for tokens in (2, 1):
        outcome = command_line(
            "evaluate", "--target", hub_target, "--draft-model", draft, "--prompts", rows_file, "--card", "--json",
            "--max-new-tokens", 12, "--num-draft-tokens", tokens,
        )  # fmt: skip
        assert outcome.code == 0
    document = json.loads(outcome.out)
    text = (draft / "README.md").read_text()
    assert text.startswith(card_of_training)
    section = text.removeprefix(card_of_training)
    assert section.startswith("\n## Evaluation\n\nMeasured in engine hf (")
    assert ", 1 draft tokens per round." in section
    greedy, sampled = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line.startswith("| all")
    )
    assert greedy[:3] == ["all 40", "0", f"{document['greedy']['acceptance_length']:.2f}"]
    assert sampled[1:3] == ["1", f"{document['sampled']['acceptance_length']:.2f}"]
    assert greedy[4] == f"{document['greedy']['acceptance_per_position'][0]:.2f}"


def test_a_draft_without_a_card_gets_one_by_its_evaluation(command_line, draft, hub_target, rows_file):
    (draft / "README.md").unlink()
    words = ("--target", hub_target, "--draft-model", draft, "--prompts", rows_file, "--max-new-tokens", 4)
    assert command_line("evaluate", *words, "--card").code == 0
    front, text = card_of(draft)
    assert front["base_model"] == "Some-Lab/Tiny-1"
    assert text.count("## Evaluation") == 1


def test_a_card_that_is_a_link_is_refused_before_the_evaluation(
    command_line, draft, hub_target, rows_file, tmp_path
):
    (draft / "README.md").rename(tmp_path / "elsewhere.md")
    (draft / "README.md").symlink_to(tmp_path / "elsewhere.md")
    words = ("--target", hub_target, "--draft-model", draft, "--prompts", rows_file)
    assert (
        "README.md is a link: expected a file of its own" in command_line("evaluate", *words, "--card").error
    )


@pytest.mark.parametrize(
    "words", [("--server", "http://127.0.0.1:9"), ("--breakdown", "--target", "t", "--draft", "d")]
)
def test_a_card_needs_a_draft_that_is_evaluated(command_line, rows_file, words):
    assert "--card with --" in command_line("evaluate", *words, "--prompts", rows_file, "--card").error


@pytest.mark.parametrize("layout", [[], ["--format", "speculators"]], ids=str)
def test_a_converted_draft_has_a_card_of_its_own(command_line, draft, hub_target, tmp_path, layout):
    theirs = as_specforge(draft, hub_target, tmp_path / "theirs")
    (theirs / "README.md").write_text("---\nlicense: mit\n---\nTheirs.\n")
    words = ("convert", "--draft-model", theirs, "--target", hub_target, "--output", tmp_path / "ours")
    assert command_line(*words, *layout).code == 0
    front, text = card_of(tmp_path / "ours")
    assert front["tags"][1] == "eagle3"
    assert "## Training" not in text


def test_a_run_goes_on_from_a_folder_with_a_card(command_line, draft, hub_target, rows_file, tmp_path):
    """The card names the start by its folder alone."""
    words = [
        "train", "--target", hub_target, "--data", rows_file, "--output", tmp_path / "run", "train.steps=1",
        f"draft.init_from={draft}",
    ]  # fmt: skip
    assert command_line(*words).code == 0
    _, text = card_of(tmp_path / "run" / "draft")
    assert "  init_from: draft" in text.splitlines()
    assert str(tmp_path) not in text


def test_a_folder_of_speculators_has_the_card_and_names_the_target(command_line, trained, tmp_path):
    words = ("--checkpoint", trained / "checkpoints" / "step-4", "--output", tmp_path / "draft")
    outcome = command_line("export", *words, "--format", "speculators")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1].endswith(f" {tmp_path / 'draft'}")
    fields = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert fields["speculators_config"]["verifier"]["name_or_path"] == "Some-Lab/Tiny-1"
    _, card = card_of(tmp_path / "draft")
    assert str(tmp_path) not in card
    assert "## Training" in card
    assert len({file.stat().st_mode for file in (tmp_path / "draft").iterdir()}) == 1, "others may serve it"


def test_what_cannot_be_pushed_to_the_hub_is_refused_before_the_export(command_line, trained, tmp_path):
    words = (
        "export",
        "--checkpoint",
        trained / "checkpoints" / "step-4",
        "--output",
        tmp_path / "draft",
        "--push-to-hub",
    )
    assert "a name of the hub is owner/name" in command_line(*words, "draft").error
    assert command_line(*words, "me/draft", "--format", "gguf").error.startswith(
        "--push-to-hub=me/draft with --format=gguf of one file"
    )
    assert not (tmp_path / "draft").exists()
