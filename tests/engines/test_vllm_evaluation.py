"""Evaluations by the real vLLM: four formats of benchmarks, loads, and drafts of other projects."""

from __future__ import annotations

import json

import pytest

from spec_core.records import SamplingParams
from spec_core.targets.target_reader import read_target
from spec_trainer.cli import run
from spec_trainer.data.tokens import Encoder
from spec_trainer.evaluation.benchmarks import Questions, read_benchmarks
from spec_trainer.evaluation.command import measure
from spec_trainer.evaluation.measure import ask_all
from spec_trainer.evaluation.workload import Workload

from ..integration.foreign_layouts import as_specforge, as_speculators
from .conftest import NUM_DRAFT_TOKENS
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts"), pytest.mark.timeout(900)]

ROWS = {
    "mt_bench": {"prompt_id": 1, "category": "math", "prompt": ["Who is it?", "Why so?"], "reference": []},
    "gsm8k": {"question": "Tom has 3 hens. How many?", "answer": "3\n#### 3"},
    "math500": {"problem": "Solve x = 1.", "solution": "1", "answer": "1"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def one():\n", "test": "", "entry_point": "one"},
}
REPEATED = 3
"""Rows of each."""
SAMPLING = SamplingParams(max_new_tokens=30, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)


def test_figures_of_benchmarks_and_loads(llama, trained_draft, sharing_engine, tmp_path) -> None:
    trained, engine = trained_draft("eagle3"), sharing_engine(llama)
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * REPEATED)
    rows = read_benchmarks(dict.fromkeys(ROWS), tmp_path)
    asked = Questions(rows, Encoder(llama, read_target(llama).vocab_size), 160)
    work = Workload(prompts=asked.prompts, sampling=SAMPLING, concurrency=(2, 8))
    work = ask_all(engine, work, asked)
    figures = measure(engine, trained.folder, work, None)
    assert figures["outputs_equal"]
    assert {name: row["prompts"] for name, row in figures["benchmarks"].items()} == {
        "mt_bench": 2 * REPEATED, "gsm8k": REPEATED, "math500": REPEATED, "humaneval": REPEATED,
    }  # fmt: skip
    assert 1 <= figures["acceptance_length_per_request"] <= 1 + NUM_DRAFT_TOKENS
    assert figures["acceptance_length_per_request"] == pytest.approx(figures["acceptance_length"], abs=0.3)
    few, many = figures["throughput"]
    assert (few["concurrency"], many["concurrency"]) == (2, 8)
    for load in (few, many):
        for side in ("without_draft", "with_draft"):
            assert load[side]["time_to_first_token_ms"]["mean"] > 0
            assert load[side]["inter_token_latency_ms"]["mean"] > 0
            assert load[side]["tokens_per_s_per_user"] > 0


@pytest.mark.parametrize(("name", "layout"), [("dflash", as_speculators), ("eagle3", as_specforge)])
def test_a_draft_of_another_project_is_served_as_it_is_and_converted(
    llama, trained_draft, sharing_engine, tmp_path, name, layout
) -> None:
    """The converted folder is what we have exported of the same weights, so that is what serves afterwards."""
    trained = trained_draft(name)
    theirs = layout(trained.folder, llama, tmp_path / "theirs")
    words = ["--draft-model", theirs, "--target", llama, "--output", tmp_path / "converted"]
    assert run(["convert", *map(str, words)]) == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "converted" / file).read_bytes() == (trained.folder / file).read_bytes()
    texts, lengths = [], []
    for folder in (theirs, trained.folder):
        engine = sharing_engine(llama)
        engine.load_draft(folder)
        texts.append([answer.token_ids for answer in engine.generate(trained.prompts, SAMPLING)])
        lengths.append(engine.acceptance().acceptance_length)
    assert texts[0] == texts[1]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-3)
    assert lengths[0] > 1.2
