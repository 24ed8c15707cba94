"""SGLang's answers say at which depth each token was guessed, as a replay with our own proposer finds it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core.engine import EngineContext
from spec_core.records import SamplingParams
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_kit.targets.target_reader import read_target

from ..transformers_target import Transformer
from .conftest import BATCH_TOKENS, NUM_DRAFT_TOKENS
from .replay import Replay, prefilled
from .sglang_here import ARGS, needs_sglang, sglang_environment  # noqa: F401 (a fixture)

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang"),
    pytest.mark.slow,
]

DRAFTED = SamplingParams(max_new_tokens=100, num_draft_tokens=NUM_DRAFT_TOKENS)
ROOM = {"disable_radix_cache": False, "max_total_tokens": 800, "schedule_conservativeness": 0.1}
REQUESTS = 24
STOPS = (11, 12)


@pytest.mark.timeout(900)
def test_depths_are_those_of_a_replay(llama, trained_draft) -> None:
    """Requests share a cached prefix, some end at a stop token, and the KV cache is too small for all of them.

    SGLang computes a retracted request again, and that prefill yields a token without a guess.
    """
    trained = trained_draft("eagle3")
    draw = random.Random(1)
    prefix = [draw.randrange(3, 97) for _ in range(BATCH_TOKENS)]
    prompts = [prefix + prompt for prompt in trained.prompts[:REQUESTS]]
    context = EngineContext(
        backend=CpuBackend(CpuBackend.Config()), placement="colocated", start_s=240.0, peer_s=60.0
    )
    config = SglangConfig(name="sglang", dtype="float32", batch_tokens=BATCH_TOKENS, args=ARGS | ROOM)
    target = replace(read_target(llama), eos_token_ids=STOPS)
    with SglangEngine.create(config, target, context) as served:
        served.load_draft(trained.folder)
        answers = served.generate(prompts, DRAFTED)
        rounds = served.acceptance().rounds
    reference = Transformer(llama)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        replay = Replay(llama, trained.folder, len(prompt), tokens, reference.hidden(tokens))
        assert list(answer.guess_depths) == replay.depths(NUM_DRAFT_TOKENS, answer.guess_depths)
    assert sum(answer.guess_depths.count(1) for answer in answers) == rounds
    early = sum(len(answer.token_ids) < DRAFTED.max_new_tokens for answer in answers)
    again = sum(prefilled(answer.guess_depths, NUM_DRAFT_TOKENS) for answer in answers)
    print(f"{rounds} rounds, {early} answers stopped, {again} tokens of a repeated prefill")
    assert sum(answer.cached_tokens for answer in answers) > 0
    assert early > 0
    assert again > 0
