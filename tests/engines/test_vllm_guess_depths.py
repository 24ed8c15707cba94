"""vLLM's answers say at which depth each token was guessed, as a replay with our own proposer finds it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from spec_core.records import SamplingParams
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.targets.target_reader import read_target

from ..transformers_target import Transformer
from .conftest import BATCH_TOKENS, MAX_LENGTH, NUM_DRAFT_TOKENS, VLLM_ARGS
from .replay import Replay, prefilled
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts")]

DRAFTED = SamplingParams(max_new_tokens=100, num_draft_tokens=NUM_DRAFT_TOKENS)
BLOCK = 32
"""Tokens of a block of the KV cache."""
CACHED_PREFIX = 2 * BLOCK
BLOCKS = 24
REQUESTS = 24
STOPS = (11, 12)


@pytest.mark.filterwarnings("ignore")  # of vLLM's modules, which are imported here
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["scheduler", "asynchronous scheduler"])
@pytest.mark.parametrize("blocks", [30, 14])
def test_depths_are_those_that_the_workers_know(llama, steps_ahead, blocks) -> None:
    """vLLM's schedulers cut prompts into chunks, find cached prefixes, and preempt and pad requests."""
    from . import vllm_steps

    resumed = 0
    for seed in range(4):
        served = vllm_steps.Served(
            vllm_steps.new_scheduler(llama, bool(steps_ahead), blocks), random.Random(seed)
        )
        served.add(REQUESTS)
        served.run(steps_ahead)
        expected = {name: [served.depth_of[token] for token in text] for name, text in served.texts.items()}
        assert served.reported == expected
        resumed += served.resumed
    assert resumed > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["eagle3", "eagle3, two layers", "dflash", "peagle", "mtp"])
def test_depths_are_those_of_a_replay(name, trained_draft, vllm_context, vllm_environment) -> None:
    """Requests share a cached prefix, some end at a stop token, and the KV cache is too small for all of them.

    vLLM computes a preempted request again, and that prefill yields a token without a guess.
    """
    trained = trained_draft(name)
    draw = random.Random(1)
    prefix = [draw.randrange(3, 97) for _ in range(CACHED_PREFIX)]
    prompts = [prefix + prompt for prompt in trained.prompts[:REQUESTS]]
    cache = {"enable_prefix_caching": True, "block_size": BLOCK, "num_gpu_blocks_override": BLOCKS}
    config = VllmConfig(
        name="vllm",
        batch_tokens=BATCH_TOKENS,
        max_model_len=MAX_LENGTH,
        kv_cache_bytes=64 << 20,
        args={**VLLM_ARGS, **cache},
    )
    target = replace(read_target(trained.target), eos_token_ids=STOPS)
    with VllmEngine.create(config, target, vllm_context) as served:
        served.load_draft(trained.folder)
        answers = served.generate(prompts, DRAFTED)
        rounds = served.acceptance().rounds
    reference = Transformer(trained.target)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        replay = Replay(trained.target, trained.folder, len(prompt), tokens, reference.hidden(tokens))
        assert list(answer.guess_depths) == replay.depths(NUM_DRAFT_TOKENS, answer.guess_depths)
    assert sum(answer.guess_depths.count(1) for answer in answers) == rounds
    early = sum(len(answer.token_ids) < DRAFTED.max_new_tokens for answer in answers)
    again = sum(prefilled(answer.guess_depths, NUM_DRAFT_TOKENS) for answer in answers)
    print(f"{name}: {rounds} rounds, {early} answers stopped, {again} tokens of a repeated prefill")
    assert sum(answer.cached_tokens for answer in answers) > 0
    assert early > 0
    assert again > 0
