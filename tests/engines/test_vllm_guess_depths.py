"""vLLM's answers say at which depth each token was guessed, as a replay with our own proposer finds it."""

import random
from dataclasses import replace

import pytest

from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.targets.target_reader import read_target

from .conftest import BATCH_TOKENS, MAX_LENGTH, VLLM_ARGS
from .replay import assert_depths_of_a_replay
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts")]

BLOCK = 32
"""Tokens of a block of the KV cache."""
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
@pytest.mark.parametrize("name", ["eagle3", "eagle3, two layers, window", "dflash", "peagle", "mtp"])
def test_depths_are_those_of_a_replay(name, trained_draft, vllm_context, vllm_environment) -> None:
    trained = trained_draft(name)
    cache = {"enable_prefix_caching": True, "block_size": BLOCK, "num_gpu_blocks_override": 24}
    config = VllmConfig(
        name="vllm",
        batch_tokens=BATCH_TOKENS,
        max_model_len=MAX_LENGTH,
        kv_cache_bytes=64 << 20,
        args={**VLLM_ARGS, **cache},
    )
    target = replace(read_target(trained.target), eos_token_ids=STOPS)
    with VllmEngine.create(config, target, vllm_context) as served:
        assert_depths_of_a_replay(served, trained, 2 * BLOCK)
