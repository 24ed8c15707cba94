"""Evaluations by the real vLLM: benchmarks, loads that an HTTP client times, too, and drafts of other projects."""

from pathlib import Path

import pytest

from spec_core.records import SamplingParams
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.app import run
from spec_trainer.cli.commands.evaluate import measure
from spec_trainer.data.tokens import Encoder
from spec_trainer.measure.evaluation.benchmarks import Questions, read_benchmarks
from spec_trainer.measure.evaluation.measure import ask_all
from spec_trainer.measure.evaluation.workload import Workload

from ..integration.foreign_layouts import as_specforge, as_speculators
from .bench_rows import ROWS, write_rows
from .conftest import NUM_DRAFT_TOKENS
from .stream_client import Client
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts"), pytest.mark.timeout(900)]

REPEATED = 3
"""Rows of each."""
SAMPLING = SamplingParams(max_new_tokens=30, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)


@pytest.fixture
def client_of(draft_notes: Path):
    """``client_of(engine)``: of the vLLM that serves the engine now."""

    def connect(engine) -> Client:
        pid = engine._process._process.pid
        return Client(int(draft_notes.with_name(f"streams-{pid}").read_text()))

    return connect


@pytest.mark.slow
def test_figures_of_benchmarks_and_loads(llama, trained_draft, sharing_engine, client_of, tmp_path) -> None:
    """Times of each load are those that a client measures of the same requests."""
    trained, engine = trained_draft("eagle3"), sharing_engine(llama)
    write_rows(tmp_path, REPEATED)
    rows = read_benchmarks(dict.fromkeys(ROWS), tmp_path)
    asked = Questions(rows, Encoder(llama, read_target(llama).vocab_size), 160)
    work = Workload(prompts=asked.prompts, sampling=SAMPLING, concurrency=(2, 8))
    work = ask_all(engine, work, asked)
    clients = {"without_draft": client_of(engine)}
    drafting = sharing_engine(llama)  # its vLLM will be the engine's, too
    drafting.load_draft(trained.folder)
    drafting.generate(work.prompts[:1], SAMPLING)
    clients["with_draft"] = client_of(drafting)
    figures = measure(engine, trained.folder, work, None)
    assert figures["outputs_equal"]
    assert {name: row["prompts"] for name, row in figures["benchmarks"].items()} == {
        "mt_bench": 2 * REPEATED, "gsm8k": REPEATED, "math500": REPEATED, "humaneval": REPEATED,
    }  # fmt: skip
    assert 1 <= figures["acceptance_length_per_request"] <= 1 + NUM_DRAFT_TOKENS
    assert figures["acceptance_length_per_request"] == pytest.approx(figures["acceptance_length"], abs=0.3)
    few, many = figures["throughput"]
    assert (few["concurrency"], many["concurrency"]) == (2, 8)
    for side, client in clients.items():
        assert min(load[side]["tokens_per_s_per_user"] for load in (few, many)) > 0
        client.end()
        theirs = client.times(slice(-len(work.prompts), None), SAMPLING.max_new_tokens)
        ours = [many[side][key]["mean"] for key in ("time_to_first_token_ms", "inter_token_latency_ms")]
        assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.slow
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
