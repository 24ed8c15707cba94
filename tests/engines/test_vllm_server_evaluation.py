"""``evaluate --server`` of two real vLLM servers on the CPU, one with a draft and one without."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spec_trainer.cli.app import run

from ..free_port import free_port
from .conftest import MAX_LENGTH, NUM_DRAFT_TOKENS
from .page_server import ServerProcess
from .trained_drafts import NEW_TOKENS
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states"), pytest.mark.timeout(900)]

START_S = 300.0
LEARNT = 16
"""Prompts whose answers the draft has learned."""


@pytest.fixture
def servers(vllm_environment, llama: Path, trained_draft, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a server with the draft, whose folder names the target, and of one without."""
    draft, words = tmp_path / "draft", ["--draft-model", trained_draft("eagle3").folder, "--target", llama]
    assert run(["convert", *map(str, words), "--format", "speculators", "--output", str(draft)]) == 0
    started: list[ServerProcess] = []
    with ExitStack() as opened:
        counts = "--per-request-spec-decode-metrics summary"
        for name, model in (("drafting", f"{draft} {counts}"), ("plain", llama)):
            port = free_port()
            command = (
                f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {model} --enforce-eager "
                f"--dtype float32 --max-model-len {MAX_LENGTH} --kv-cache-memory-bytes 64M --port {port}"
            )
            (tmp_path / name).mkdir()
            started.append(ServerProcess(command, tmp_path / name, port))
            opened.callback(started[-1].close)
        for server in started:
            server.wait_ready(START_S)
        yield started[0].url, started[1].url


@pytest.mark.slow
def test_tau_is_of_the_server_s_counters_and_greedy_texts_are_equal(
    servers, trained_draft, tmp_path, capfd
) -> None:
    """A server counts each round; the tokens of its answers are the prefills' and those of the rounds."""
    drafting, plain = servers
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"input_ids": [*ids, 3], "loss_mask": [0] * len(ids) + [1]}
        for ids in trained_draft("eagle3").prompts[: 2 * LEARNT : 2]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--server", drafting, "--baseline-server", plain, "--prompts", str(file), "--concurrency", "1,4"]
    words += ["--max-new-tokens", str(NEW_TOKENS), "--no-stop-at-eos"]
    assert run(["evaluate", *words, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["engine"], document["baseline_engine"]) == ("vllm", "vllm")
    assert document["outputs_equal"], document["first_differences"]
    assert document["generated_tokens"] == 2 * LEARNT * NEW_TOKENS
    rounds, accepted = document["rounds"], document["accepted"]
    assert document["drafted"] == NUM_DRAFT_TOKENS * rounds
    assert len(document["acceptance_per_position"]) == NUM_DRAFT_TOKENS
    assert document["acceptance_length"] == 1 + accepted / rounds
    assert document["acceptance_length"] > 1.5  # as in this server's own log
    assert document["acceptance_length_per_request"] == pytest.approx(document["acceptance_length"], rel=0.1)
    # The last round of an answer may give more than was asked for.
    least = document["generated_tokens"] - 2 * LEARNT
    assert least <= rounds + accepted <= least + 2 * LEARNT * NUM_DRAFT_TOKENS
    assert not any("meanwhile" in warning or "not whole" in warning for warning in document["warnings"])
    for entry in document["throughput"]:
        for side in (entry["with_draft"], entry["without_draft"]):
            assert 0 < side["time_to_first_token_ms"]["p50"] <= side["time_to_first_token_ms"]["p99"]
            assert side["inter_token_latency_ms"]["mean"] > 0
