"""Evaluations by the real vLLM: benchmarks, loads that an HTTP client times, too, and drafts of other projects."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from pathlib import Path

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


class Client:
    """Reads by HTTP when a vLLM's streamed requests begin, and when each part of their answers comes.

    A line says when it was written. So a busy machine, where a client reads late, changes nothing but ``late_s``.
    """

    def __init__(self, port: int) -> None:
        self.parts: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """Request -> when its parts were written, the number of tokens of each; the first one is its beginning."""
        self.late_s: list[float] = []
        self._port = port
        self._response = self._get("/")
        assert self._response.readline() == b"open\n"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("GET", path)
        return connection.getresponse()

    def _read(self) -> None:
        while (line := self._response.readline()) not in (b"end\n", b""):
            now = time.monotonic()
            name, written, tokens = line.decode().split()
            self.late_s.append(now - float(written))
            self.parts[name].append((float(written), int(tokens)))

    def times_of_last(self, count: int) -> tuple[float, float]:
        """Mean time to the first token and inter-token latency of the last ``count`` requests, in milliseconds."""
        self._get("/end")
        self._reader.join(60)
        assert not self._reader.is_alive()
        firsts, per_token = [], []
        for (begun, _), (first, _), *_, (last, _) in list(self.parts.values())[-count:]:
            firsts.append(first - begun)
            per_token.append((last - first) / (SAMPLING.max_new_tokens - 1))
        tokens = [sum(number for _, number in parts) for parts in list(self.parts.values())[-count:]]
        assert tokens == [SAMPLING.max_new_tokens] * count
        assert min(self.late_s) >= 0
        return 1e3 * fmean(firsts), 1e3 * fmean(per_token)


@pytest.fixture
def client_of(draft_notes: Path):
    """``client_of(engine)``: of the vLLM that serves the engine now."""

    def connect(engine) -> Client:
        pid = engine._process._process.pid
        return Client(int(draft_notes.with_name(f"streams-{pid}").read_text()))

    return connect


def test_figures_of_benchmarks_and_loads(llama, trained_draft, sharing_engine, client_of, tmp_path) -> None:
    """Times of each load are those that a client measures of the same requests."""
    trained, engine = trained_draft("eagle3"), sharing_engine(llama)
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * REPEATED)
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
        theirs = client.times_of_last(len(work.prompts))
        ours = [many[side][key]["mean"] for key in ("time_to_first_token_ms", "inter_token_latency_ms")]
        assert ours == pytest.approx(theirs, rel=0.05)


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
