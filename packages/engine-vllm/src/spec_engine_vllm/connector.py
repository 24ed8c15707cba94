"""CaptureConnector takes captured states out of vLLM's cache and passes them to the FeatureExporter.

vLLM imports this module itself, by ``kv_connector_module_path``. One connector is in vLLM's scheduler, which
has the requests. Another is in each worker, which has the states. vLLM's method ``extract_hidden_states``
writes the states of every token into a separate cache, in the blocks of the token's request, so a prompt may
be run in chunks. In the step that runs the last chunk, the scheduler's connector sends the request's block
ids to the workers. The worker's connector gathers these blocks after all of that step's forward passes
(``wait_for_save``). Later writes into the blocks run on the same stream after the gather, so no block has to
be reserved.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

# vLLM's own reader of this cache: its layout is [block, token, N, H] in 0.26, [block, N, token, H] in 0.32.
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from spec_core.errors import EngineError
from spec_core.records import FeatureSchema
from spec_kit.hosting import CAPTURE_VARIABLE, FeatureExporter

log = logging.getLogger(__name__)


@dataclass
class Prompt:
    """A request to be captured, while vLLM runs its prompt."""

    request_id: int
    destinations: list[str]
    expected_ids: list[int] | None
    """The token ids that vLLM should run for a prompt with images, whose tokens vLLM inserts itself; None for
    text."""
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class Captures(KVConnectorMetadata):
    """The message of the scheduler's connector to the workers in one step."""

    complete: list[Prompt] = field(default_factory=list)
    """Prompts whose last chunk runs in this step."""
    lost: list[int] = field(default_factory=list)
    """Ids of requests that ended before their prompt had been run."""


class CaptureConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector of vLLM that captures states; it transfers no keys and values."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Make the connector. The arguments are vLLM's arguments of every connector."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group = _states_group(kv_cache_config)
        self._block_size: int = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._prompts: dict[str, Prompt] = {}
        self._lost: list[int] = []
        self._exporter: FeatureExporter | None = None
        self._cache: Tensor | None = None

    # Methods that vLLM calls in the scheduler.

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the message to the workers for the step that the scheduler has just planned."""
        captures = Captures(lost=self._lost)
        self._lost = []
        for request_id, num_computed in self._planned(scheduler_output):
            prompt = self._prompts[request_id]
            num_run = num_computed + scheduler_output.num_scheduled_tokens[request_id]
            if num_run >= len(prompt.token_ids):
                captures.complete.append(self._prompts.pop(request_id))
        return captures

    def _planned(self, scheduler_output: Any) -> Iterable[tuple[str, int]]:
        """Record the blocks of each prompt in this step; yield its name and its number of computed tokens."""
        for new in scheduler_output.scheduled_new_reqs:
            if (assignment := _assignment(new.sampling_params)) is not None:
                self._prompts[new.req_id] = Prompt(
                    **assignment,
                    token_ids=list(new.prompt_token_ids),
                    block_ids=self._of_group(new.block_ids),
                )
                yield new.req_id, new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            blocks = self._of_group(cached.new_block_ids[index])
            resumed = request_id in cached.resumed_req_ids  # it was preempted and lost its blocks
            prompt.block_ids = blocks if resumed else prompt.block_ids + blocks
            yield request_id, cached.num_computed_tokens[index]

    def _of_group(self, block_ids: tuple[list[int], ...] | None) -> list[int]:
        return list(block_ids[self._group]) if block_ids else []

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once. A request that was aborted is recorded as lost."""
        if (prompt := self._prompts.pop(request.request_id, None)) is not None:
            self._lost.append(prompt.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        return self.request_finished_all_groups(request, block_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return 0 tokens, because this connector loads no keys and values."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing, because this connector loads no keys and values."""

    # Methods that vLLM calls in a worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Connect the exporter on the first rank only: every tensor-parallel rank has the complete states."""
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        self._cache = kv_caches[name]
        if self._exporter is None:
            self._exporter = FeatureExporter(os.environ[CAPTURE_VARIABLE])

    def wait_for_save(self) -> None:
        """Export the states of the prompts whose last chunk this step has run.

        vLLM calls this after all forward passes of the step, including the state extractor's pass.
        """
        if self._exporter is None or not self.has_connector_metadata():
            return
        captures = self._get_connector_metadata()
        if not isinstance(captures, Captures):
            return
        for request_id in captures.lost:
            self._exporter.fail(request_id, EngineError("vLLM ended the request before its prompt was run"))
        for prompt in captures.complete:
            if prompt.expected_ids is not None and prompt.token_ids != prompt.expected_ids:
                self._exporter.fail(prompt.request_id, EngineError(_difference(prompt)))
                continue
            try:
                hidden_TNH = self._gather(prompt, self._exporter.schema)
                self._exporter.export(prompt.request_id, prompt.destinations, prompt.token_ids, hidden_TNH)
            except RuntimeError as error:  # for example, torch is out of memory
                log.exception("states of request %d could not be gathered", prompt.request_id)
                self._exporter.fail(prompt.request_id, error)

    def _gather(self, prompt: Prompt, schema: FeatureSchema) -> Tensor:
        """Return the prompt's states [T, N, H] as a new tensor, without waiting for the device."""
        assert self._cache is not None
        num_tokens = len(prompt.token_ids)
        starts = torch.tensor(prompt.block_ids, dtype=torch.int64) * self._block_size
        slots_T = (starts[:, None] + torch.arange(self._block_size)).flatten()[:num_tokens]
        slots_T = slots_T.to(self._cache.device, non_blocking=True)
        hidden_TNH = extract_from_kv_cache(self._cache, slots_T, num_tokens)
        if tuple(hidden_TNH.shape) != schema.shape(num_tokens):
            raise RuntimeError(f"vLLM holds states of shape {list(hidden_TNH.shape)}, not {schema}")
        return hidden_TNH.to(schema.torch_dtype()).contiguous()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing, because this connector loads no keys and values."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because this connector loads no keys and values."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: ``wait_for_save`` reads the states when the step's passes are complete."""

    def shutdown(self) -> None:
        """Close the exporter."""
        if self._exporter is not None:
            self._exporter.close()


def _states_group(kv_cache_config: Any) -> int:
    """Return the index of the cache group that holds the states."""
    groups = kv_cache_config.kv_cache_groups
    found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not found and len(groups) == 1:  # the states share the target's group, and thus its table of blocks
        return 0
    if len(found) != 1:
        raise ValueError(
            f"vLLM keeps the hidden states in {len(found)} of its {len(groups)} groups of caches, expected 1: this "
            "target cannot be captured"
        )
    return found[0]


def _difference(prompt: Prompt) -> str:
    """Return the error message for a prompt with images whose token ids are not the expected ids."""
    assert prompt.expected_ids is not None
    run, expected = len(prompt.token_ids), len(prompt.expected_ids)
    return (
        f"vLLM ran {run} tokens for a sample with images, expected {expected}"
        f"{'' if run != expected else ' with other ids'}: its image processor and the trainer's disagree; install "
        "the same version of transformers for both"
    )


def _assignment(sampling_params: Any) -> dict[str, Any] | None:
    """Return the id and the destinations of a request that must be captured; None for other requests."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    return extra.get("kv_transfer_params")
