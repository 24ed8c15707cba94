"""vLLM's own scheduler over a stand-in for its workers, which yields a token id only once.

So a token of an answer shows which step has yielded it, and the worker knows how many guesses that step verified.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from spec_engine_vllm.guess_depths import SCHEDULER, guess_depths_of

BLOCK = 16
GUESSES = 3


def new_scheduler(target: Path, is_async: bool, blocks: int) -> Any:
    """Return the scheduler that an engine core of vLLM would use, with ``blocks`` blocks of a KV cache."""
    arguments = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=200,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        enable_prefix_caching=True,
        block_size=BLOCK,
        scheduler_cls=SCHEDULER,
        disable_log_stats=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 2},
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = is_async  # always off on a CPU
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], layer)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


@dataclass
class Served:
    """Requests that a scheduler serves; prompts share their beginnings."""

    scheduler: Any
    draw: random.Random
    lengths: dict[str, int] = field(default_factory=dict)
    depth_of: dict[int, int] = field(default_factory=dict)
    """Token id → depth at which the workers' draft guessed it."""
    texts: dict[str, list[int]] = field(default_factory=dict)
    reported: dict[str, list[int]] = field(default_factory=dict)
    resumed: int = 0
    new_ids: count = field(default_factory=lambda: count(1000))

    def add(self, number: int) -> None:
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        for name in map(str, range(number)):
            self.lengths[name], self.texts[name] = self.draw.randrange(3, 90), []
            sampling = SamplingParams(max_tokens=self.draw.randrange(1, 60), ignore_eos=True)
            prompt = list(range(self.lengths[name]))
            self.scheduler.add_request(
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    sampling_params=sampling,
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )

    def run(self, steps_ahead: int) -> None:
        """Run all requests; ``steps_ahead`` steps are scheduled before the workers' first answer is there."""
        ahead: deque[tuple[Any, dict[str, list[int]]]] = deque()
        while ahead or self.scheduler.has_requests():
            while self.scheduler.has_requests() and len(ahead) <= steps_ahead:
                scheduled = self.scheduler.schedule()
                ahead.append((scheduled, self._sampled(scheduled)))
            self._update(*ahead.popleft())
            if not steps_ahead:  # else the workers keep the guesses
                guessing = [name for name, text in self.texts.items() if text and name not in self.reported]
                self.scheduler.update_draft_token_ids(
                    DraftTokenIds(guessing, [[5] * GUESSES for _ in guessing])
                )

    def _sampled(self, scheduled: Any) -> dict[str, list[int]]:
        """Return the new tokens of each request; the target accepts a random number of guesses."""
        cached = scheduled.scheduled_cached_reqs
        state = {new.req_id: (new.num_computed_tokens, 0) for new in scheduled.scheduled_new_reqs}
        begun = state.keys() | cached.resumed_req_ids
        known = zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        state |= dict(zip(cached.req_ids, known, strict=True))
        self.resumed += len(cached.resumed_req_ids)
        sampled = {}
        for name, tokens in scheduled.num_scheduled_tokens.items():
            guesses = 0 if name in begun else len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            computed, answered = state[name]
            is_complete = guesses or computed + tokens >= self.lengths[name] + answered
            accepted = self.draw.randint(0, guesses)
            sampled[name] = [next(self.new_ids) for _ in range(accepted + 1 if is_complete else 0)]
            depths = enumerate(sampled[name], start=1)
            self.depth_of |= {token: depth if depth <= guesses else 0 for depth, token in depths}
        return sampled

    def _update(self, scheduled: Any, sampled: dict[str, list[int]]) -> None:
        names = list(sampled)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
        )
        for message in self.scheduler.update_from_output(scheduled, ran).values():
            for output in message.outputs:
                self.texts[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.reported[output.request_id] = guess_depths_of(output)
