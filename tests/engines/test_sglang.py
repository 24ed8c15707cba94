"""The real SGLang on a processor: its states, its texts with a draft, and the latencies that ``evaluate`` tells."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_engine_sglang.arguments import ENVIRONMENT, server_arguments
from spec_engine_sglang.serving import SglangServing
from spec_kit.drafting import recognise
from spec_kit.hosting import PlainMode
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget, draw_draft
from spec_testing.answer_checks import assert_guess_depths

from ..captured_states import captured
from ..unit.draft_folders import edit_fields
from .conftest import BATCH_TOKENS, NUM_DRAFT_TOKENS
from .replay import assert_depths_of_a_replay
from .sglang_here import ARGS, needs_sglang, new_sglang
from .weights_of_engines import assert_other_weights_are_noticed

if TYPE_CHECKING:
    from spec_engine_sglang.engine import SglangEngine

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(600),
]
LAYERS = (0, 3, 5, 8)
"""The embedding, two layers, and what enters the final norm."""
OWN_LAYERS = (3, 5)
"""The layers of ``LAYERS`` that SGLang's own capture has."""
OWN_CAPTURE = """
import json, sys
import sglang
arguments, prompts = json.loads(sys.argv[1])
engine = sglang.Engine(**arguments)
for prompt in prompts:
    answer = engine.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 1}, return_hidden_states=True
    )
    print("STATES", json.dumps(answer["meta_info"]["hidden_states"]))
engine.shutdown()
"""
READ_ARGUMENTS = """
import json, sys
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams
given = prepare_server_args([*sys.argv[2:], "--device", "cpu"])
given.resolve_once()
arguments = resolved_view(given)
assert arguments.speculative_adaptive
read = AdaptiveSpeculativeParams(arguments.speculative_num_steps, arguments.speculative_adaptive_config)
print("STEPS", json.dumps([read.get_steps_for_batch(load) for load in json.loads(sys.argv[1])]))
"""


def test_latencies_of_loads_are_those_that_a_client_measures(llama, trained_draft, tmp_path) -> None:
    """The whole command, as it is run on a GPU. It comes first: an idle SGLang polls, and would cost it a core."""
    command = [
        sys.executable, "-m", "benchmarks.gpu.sglang_evaluation", "--backend", "cpu", "--output", tmp_path,
    ]  # fmt: skip
    command += ["--target", llama, "--draft", trained_draft("eagle3").folder, "--repeated", 2]
    command += ["--draft-tokens", NUM_DRAFT_TOKENS, "--new-tokens", 30, "--concurrency", "1,4", "--"]
    command += ["engine.dtype=float32", f"engine.batch_tokens={BATCH_TOKENS}"]
    command += [f"engine.args.{key}={str(value).lower()}" for key, value in ARGS.items()]
    # It exits with 1 if a latency differs by more than 5 %.
    subprocess.run([str(word) for word in command], cwd=Path(__file__).parents[2], check=True)
    document = json.loads((tmp_path / "sglang-evaluation.json").read_text())
    assert document["outputs_equal"]
    assert document["acceptance_length"] > 1
    assert len(document["loads"]) == 4


@pytest.fixture(scope="module")
def engine(llama: Path, sglang_environment: None) -> Iterator[SglangEngine]:
    with new_sglang(read_target(llama)) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The last one runs in chunks."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (length,), generator=draw).tolist() for length in (5, 17, 150)]


def states_of(engine: SglangEngine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the states [T, N, H] of prompts that may share forward passes."""
    schema = FeatureSchema(layers=LAYERS, hidden_size=engine.target.hidden_size, dtype="float32")
    requests = [CaptureRequest(request_id=0, input_ids=tuple(ids), destinations=()) for ids in prompts]
    return captured(engine, engine.context.backend.transport("colocated"), schema, requests)


def test_states_are_those_of_transformers(llama, engine, prompts) -> None:
    states, reference = states_of(engine, prompts), TransformersTarget(llama)
    for number, prompt in enumerate(prompts):
        expected = reference.hidden(prompt)[:, list(LAYERS)]
        torch.testing.assert_close(states[number], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_states_are_those_of_sglangs_own_capture(engine, prompts, monkeypatch) -> None:
    """Each prompt runs alone, in either process, so that both compute the same sums.

    Of a prompt that runs in chunks, SGLang returns the last chunk's states.
    """
    arguments = server_arguments(engine.config, engine.target, None, PlainMode())
    arguments |= {
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": "EAGLE3",
        "return_aux_hidden_state_layer_ids": [layer - 1 for layer in OWN_LAYERS],
    }
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    words = [sys.executable, "-c", OWN_CAPTURE, json.dumps([arguments, prompts])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    lines = [line.removeprefix("STATES ") for line in done.stdout.splitlines() if line.startswith("STATES ")]
    assert len(lines) == len(prompts), done.stderr[-3000:]
    columns = [LAYERS.index(layer) for layer in OWN_LAYERS]
    for prompt, line in zip(prompts, lines, strict=True):
        (rows,) = json.loads(line)
        assert len(rows) == (len(prompt) - 1) % engine.config.batch_tokens + 1
        (ours,) = states_of(engine, [prompt])
        assert torch.equal(ours[-len(rows) :, columns].flatten(1), torch.tensor(rows))


@pytest.mark.slow
def test_sglang_reads_the_draft_tokens_of_each_load(llama, tmp_path) -> None:
    """The shell runs the printed command, with SGLang's own reader of arguments instead of its server."""
    target, folder = read_target(llama), tmp_path / "draft"
    draw_draft(folder, target, seed=0)
    by_load, loads = {1: 5, 6: 3, 20: 0}, [1, 5, 6, 19, 20, 300]
    command = SglangServing().command_by_load(target, recognise(folder, target), folder, by_load)
    reader = shlex.join([sys.executable, "-c", READ_ARGUMENTS, json.dumps(loads)])
    command = command.replace("python -m sglang.launch_server", reader)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=280, check=False)
    assert f"STEPS {[5, 5, 3, 3, 0, 0]}" in done.stdout.splitlines(), done.stderr[-3000:]


def test_texts_and_acceptance_are_those_of_transformers(llama, engine, trained_draft) -> None:
    """A draft guesses: the command above has compared texts with and without one."""
    trained = trained_draft("eagle3")
    guess_as_transformers_does(engine, llama, trained.folder, trained.prompts)


@pytest.mark.slow
@pytest.mark.parametrize("window", [8, 11])
def test_a_window_is_as_wide_as_ours(llama, trained_draft, tmp_path, window) -> None:
    trained = trained_draft("eagle3")
    shutil.copytree(trained.folder, tmp_path / "draft")
    edit_fields(tmp_path / "draft", layer_types=["sliding_attention"], sliding_window=window)
    with new_sglang(read_target(llama)) as engine:
        depths = guess_as_transformers_does(engine, llama, tmp_path / "draft", trained.prompts)
        assert depths != guess_as_transformers_does(engine, llama, trained.folder, trained.prompts)


def guess_as_transformers_does(
    engine: SglangEngine, target: Path, draft: Path, prompts: list[list[int]]
) -> list[tuple[int, ...]]:
    drafting = SamplingParams(max_new_tokens=40, stop_at_eos=False, num_draft_tokens=NUM_DRAFT_TOKENS)
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(target), context) as hf:
        hf.load_draft(draft)
        expected = hf.generate(prompts, drafting)
        accepted = hf.acceptance().acceptance_length
    engine.load_draft(draft)
    answers = engine.generate(prompts, drafting)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert engine.acceptance().acceptance_length == pytest.approx(accepted, rel=0.02)
    assert_guess_depths(engine, answers, engine.acceptance())
    depths = [answer.guess_depths for answer in answers]
    assert depths == [answer.guess_depths for answer in expected]
    return depths


def test_weights_of_a_left_over_file_are_noticed(llama, tmp_path) -> None:
    assert_other_weights_are_noticed(new_sglang, llama, tmp_path, "lm_head.weight", "head")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_depths_are_those_of_a_replay(llama, trained_draft) -> None:
    target = replace(read_target(llama), eos_token_ids=(11, 12))
    room = {"disable_radix_cache": False, "max_total_tokens": 800, "schedule_conservativeness": 0.1}
    with new_sglang(target, **room) as served:
        assert_depths_of_a_replay(served, trained_draft("eagle3"), BATCH_TOKENS)
