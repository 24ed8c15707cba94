"""``step_batch`` maps the rows of a step's hidden states to requests, for both of vLLM's model runners.

vLLM has two model runners with the same calls. The first one is ``vllm.v1.worker.gpu_model_runner``; the second one,
``vllm.v1.worker.gpu.model_runner``, runs if the variable ``VLLM_USE_V2_MODEL_RUNNER`` is 1 and, on GPUs, by default
for most targets. Both keep a step's states in ``execute_model_state`` until tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_kit.live_traffic import StepBatch


def step_batch(
    runner: Any, state: Any, num_scheduled_tokens: Mapping[str, int], keys: Mapping[str, str]
) -> StepBatch:
    """Return the batch of the step that ``runner`` has just run.

    ``state``: the runner's ``execute_model_state``. ``keys``: vLLM's id of a captured request → key of its states.
    """
    if _is_second(runner):
        batch = state.input_batch
        lengths = [int(number) for number in batch.num_scheduled_tokens]
        names = [keys.get(request_id, "") for request_id in batch.req_ids]
        return StepBatch(names, lengths, batch.positions, batch.input_ids)
    request_ids = list(runner.input_batch.req_ids)
    lengths = [num_scheduled_tokens[request_id] for request_id in request_ids]
    names = [keys.get(request_id, "") for request_id in request_ids]
    positions = runner._get_positions(sum(lengths))
    token_ids = runner.input_ids.gpu
    # Multimodal rotary embeddings have three positions, which are equal for text.
    return StepBatch(names, lengths, positions if positions.dim() == 1 else positions[0], token_ids)


def drafted_layers(runner: Any) -> tuple[int, ...]:
    """Return the layers whose states the draft reads, as vLLM's model runner has chosen them."""
    if _is_second(runner):
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

        layers = get_eagle3_aux_layers_from_config(runner.speculative_config)
    else:
        layers = runner._get_eagle3_aux_layers_from_config()
    return tuple(layers or runner.model.get_eagle3_default_aux_hidden_state_layers())


def _is_second(runner: Any) -> bool:
    return hasattr(runner, "req_states")
