"""The quickstart end to end at a toy size: files, training, measurements, report; its cache."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from spec_core.errors import ArtifactError, PluginNotFound
from spec_core.records import SamplingParams
from spec_trainer.cli.app import run
from spec_trainer.cli.quickstart import run as quickstart

from .....docs.workplace import TOY as TOY_TARGET

TOY = quickstart.QuickstartSize(
    target=TOY_TARGET,
    library=Path(asyncio.__file__).parent,
    training=("train.steps=3", "train.global_batch_tokens=256", "data.max_length=64", "draft.num_steps=2"),
    num_prompts=2,
    sampling=SamplingParams(max_new_tokens=8, temperature=1.0, num_draft_tokens=2, stop_at_eos=False),
)
CONTRACT = (
    "acceptance_length_before", "acceptance_length", "acceptance_per_position", "drafted", "accepted",
    "rounds", "generated_tokens", "outputs_equal", "tokens_per_s", "tokens_per_s_without_draft",
    "acceptance_length_bigram", "acceptance_length_prompt_lookup",
)  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder in which the tiny target and its files are made once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(quickstart, "HELD_OUT_ROWS", 3)
        yield folder


def test_a_cache_that_cannot_be_made_is_refused_before_the_target_is_trained(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ArtifactError, match=r"^cache \(XDG_CACHE_HOME sets another\) .* is not a folder that can be"
    ):
        quickstart.run_quickstart("eagle3", "hf", tmp_path / "out", TOY)
    assert not (tmp_path / "out").exists()


def test_it_measures_and_reports(cache, tmp_path, caplog):
    caplog.set_level("INFO", "spec_trainer.cli.quickstart.stages")
    summary = quickstart.run_quickstart("eagle3", "hf", tmp_path / "out", replace(TOY, seed=3))
    assert "\nseed: 3\n" in (tmp_path / "out/config.yaml").read_text()
    assert [key for key in CONTRACT if key not in summary] == []
    assert summary == json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["outputs_equal"] is True
    assert summary["generated_tokens"] == 16
    shown = [message for message in caplog.messages if message.startswith("[")]
    assert [int(message.split("%")[0].split()[-1]) for message in shown] == [0, 2, 44, 44, 81, 99]
    assert shown[3].endswith("training the draft; next: measuring, writing the report")
    report = (tmp_path / "out/report.html").read_text()
    titles = (
        "What the numbers say",
        "Speed by number of draft tokens",
        "What was guessed, and what was refused",
        "Acceptance by topic",
    )
    assert [title for title in ("bigram draft", *titles) if title not in report] == []
    assert "http" not in re.sub(
        r"http://www.w3.org/\S+|https?://(purl|matplotlib|creativecommons)\.org\S*", "", report
    )
    judged = [token for text in summary["texts"] for token in text["tokens"]]
    assert len(judged) == 16
    assert sum(bool(token["place"]) or token["refused"] is not None for token in judged) > 0
    assert [row["num_draft_tokens"] for row in summary["speeds"]] == [0, 1, 2, 4]
    assert sum(row["rounds"] for row in summary["topics"].values()) == summary["rounds"]
    assert "speed-up with the trained draft, one text at a time" in quickstart.highlights(summary, tmp_path)


def test_the_target_is_made_once_and_held_out_prompts_are_from_other_files(cache):
    files = quickstart.prepare_files(TOY)
    (weights,) = cache.rglob("target/model.safetensors")
    made_at = weights.stat().st_mtime_ns
    assert quickstart.prepare_files(TOY).folder == files.folder
    assert weights.stat().st_mtime_ns == made_at
    trained = {json.loads(line)["text"] for line in files.train.read_text().splitlines()}
    held_out = [json.loads(line)["text"] for line in files.held_out.read_text().splitlines()]
    assert len(held_out) == quickstart.HELD_OUT_ROWS
    assert not trained & set(held_out)


@pytest.mark.parametrize(
    ("draft", "engine", "backend"),
    [("eagle", "hf", "cpu"), ("eagle3", "hff", "cpu"), ("eagle3", "hf", "gpu")],
)
def test_an_unknown_plugin_fails_before_anything_is_trained(tmp_path, monkeypatch, draft, engine, backend):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PluginNotFound, match=r"no (draft|engine|backend) plugin is called"):
        quickstart.run_quickstart(draft, engine, tmp_path / "out", backend=backend)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_no_run_directory_fails_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ArtifactError, match="is not empty and is no run directory; choose another"):
        quickstart.run_quickstart("eagle3", "hf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_seed_that_is_none_fails_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["quickstart", "--seed", "-1", "--output", str(tmp_path / "out")]) == 2
    assert "--seed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
