"""ServingCapture makes a vLLM server keep the hidden states of the requests that it serves.

vLLM's model runners return the states of the layers that the draft reads. ServingCapture adds the input of
the final norm to these layers, and removes it again before the drafter gets the states. After each forward
pass it copies into StateRows the rows of requests that are marked for capture. The copies run on the stream
of the forward pass, before the drafter and the next pass overwrite the buffers of CUDA graphs.

Shapes: T rows of a step, N captured layers, H hidden size.
"""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from spec_core.records import FeatureSchema
from spec_engine_vllm.step_batch import drafted_layers, step_batch
from spec_kit.live_traffic import LiveRequestsConfig, StateCopies, StateRows, states_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec_kit.hosting import Fields

log = logging.getLogger(__name__)

_CAPTURE = "_spec_capture"
"""Name of the model runner's attribute that holds its ServingCapture, or the reason why it has none."""
_SET_UPS = (
    ("vllm.v1.worker.gpu_model_runner", "_setup_eagle3_aux_hidden_state_outputs"),
    ("vllm.v1.worker.gpu.model_runner", "load_model"),
)
"""Module of each of vLLM's model runners, and the method that chooses the layers whose states the target
returns. The method runs once, after the target was loaded and before anything is compiled."""
_CACHE_KEY = "spec_states_layers"
"""A key in vLLM's ``additional_config``, whose content determines the file name of compiled code."""


def capture_if_asked() -> None:
    """Make vLLM's model runner capture states, if the environment of this process requests it."""
    config = LiveRequestsConfig.from_environment()
    if config is None or not config.states_bytes:
        return
    for module, method in _SET_UPS:
        with suppress(ImportError):  # a build may lack the second runner's dependencies
            _wrap(import_module(module).GPUModelRunner, method, config)


def _wrap(runner_class: Any, method: str, config: LiveRequestsConfig) -> None:
    """Make a model runner of vLLM capture states after ``method`` has chosen the layers."""
    set_up = getattr(runner_class, method, None)
    if set_up is None or hasattr(set_up, _CAPTURE):
        return

    @functools.wraps(set_up)
    def set_up_and_capture(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = set_up(runner, *args, **kwargs)
        if not hasattr(runner, _CAPTURE):
            reason = _reason_against(runner)
            setattr(runner, _CAPTURE, reason or ServingCapture(runner, config))
            if reason:
                log.warning("no states of requests are captured: %s", reason)
        return result

    setattr(set_up_and_capture, _CAPTURE, True)
    setattr(runner_class, method, set_up_and_capture)


def states_of(runner: Any, asked: str) -> Fields | None:
    """Return this rank's answer to a call for states, or None if another rank answers.

    ``asked``: a StatesRange as JSON, or an empty string for the layout.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() != 0:
        return None
    capture = getattr(runner, _CAPTURE, None)
    if isinstance(capture, ServingCapture):
        return capture.answer(asked)
    return {"refused": capture or _NO_CAPTURE}


_NO_CAPTURE = (
    "vLLM's workers capture no states; start vLLM with the worker extension, and with states_bytes in "
    "SPEC_LIVE_REQUESTS"
)


class ServingCapture:
    """Copies the rows of requests that are marked for capture, after each forward pass of a model runner."""

    def __init__(self, runner: Any, config: LiveRequestsConfig) -> None:
        """Add the final norm's input to the states that the target returns; wrap ``runner.execute_model``."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        drafted = drafted_layers(runner)
        num_layers = runner.model_config.hf_text_config.num_hidden_layers
        layers = sorted({*drafted, num_layers})
        runner.model.set_aux_hidden_state_layers(tuple(layers))
        _name_compiled_code(runner, layers)
        self._runner = runner
        self._num_drafted = len(set(drafted))
        self._copies: StateCopies | None = None
        if get_tensor_model_parallel_rank() == 0:  # every rank has the complete states
            dtype = str(runner.model_config.dtype).removeprefix("torch.")
            hidden_size = runner.model_config.get_hidden_size()
            schema = FeatureSchema(layers=tuple(layers), hidden_size=hidden_size, dtype=dtype)
            self._copies = StateCopies(StateRows(schema, config.states_bytes, config.age_s))
        self._keys: dict[str, str] = {}
        """vLLM's id of a request that runs → key of its states. Ids come from clients, so one may be used again."""
        self._preempted: set[str] = set()
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the model runner, and capture its states unless it is a dummy step."""
        result = self._execute(scheduler_output, *args, **kwargs)
        state = self._runner.execute_model_state
        has_states = state is not None and state.aux_hidden_states is not None
        if has_states:
            drafted = state.aux_hidden_states[: self._num_drafted]
            self._runner.execute_model_state = state._replace(aux_hidden_states=drafted)
        if self._copies is not None and not kwargs.get("dummy_run"):
            try:
                self._note(self._copies, scheduler_output, state if has_states else None)
            except Exception:  # noqa: BLE001 (``fail`` logs it)
                keys = self._captured(scheduler_output.num_scheduled_tokens)
                self._copies.fail(keys, "states of a step were not captured")
        return result

    def answer(self, asked: str) -> Fields:
        """Return the layout of states, or a piece of a request's states. ``asked``: see ``states_of``."""
        assert self._copies is not None
        return self._copies.answer(asked)

    def _note(self, copies: StateCopies, scheduler_output: Any, state: Any) -> None:
        """Record which requests begin and end, and copy this step's rows.

        ``state``: the runner's state of this step; None if there are no rows to copy.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._preempted.discard(request_id)
            if key := self._keys.pop(request_id, None):
                copies.end(key)
        self._note_beginnings(copies.rows, scheduler_output)
        if state is not None:
            batch = step_batch(self._runner, state, scheduler_output.num_scheduled_tokens, self._keys)
            copies.add(batch, state.aux_hidden_states)
        copies.write_arrived()
        copies.rows.expire()

    def _note_beginnings(self, rows: StateRows, scheduler_output: Any) -> None:
        """Record new requests. The second model runner also gets resumed requests as new: skip them."""
        self._preempted.update(self._keys.keys() & (scheduler_output.preempted_req_ids or ()))
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._preempted:
                self._preempted.discard(new.req_id)
            elif new.req_id in self._keys:  # a session that continues with further input
                rows.leave_out(self._captured([new.req_id]), "session")
            elif (key := states_key(getattr(new.sampling_params, "extra_args", None))) and rows.begin(key):
                self._keys[new.req_id] = key
        self._preempted.difference_update(scheduler_output.num_scheduled_tokens)

    def _captured(self, request_ids: Iterable[str]) -> list[str]:
        """Return the keys of those of vLLM's requests that are captured."""
        return [self._keys[one] for one in request_ids if one in self._keys]


def _name_compiled_code(runner: Any, layers: list[int]) -> None:
    """Make the file names of vLLM's compiled code depend on ``layers``.

    Otherwise vLLM would run code that was compiled for the draft's layers alone. The names are set in the
    configurations of all parts of the model, because the parts of a multimodal target have their own.
    """
    for part in (runner, *runner.model.modules()):
        if (config := getattr(part, "vllm_config", None)) is not None:
            config.additional_config[_CACHE_KEY] = layers


def _reason_against(runner: Any) -> str:
    """Return why states cannot be captured in this vLLM; an empty string if they can."""
    parallel = runner.vllm_config.parallel_config
    if not runner.use_aux_hidden_state_outputs:
        return "this vLLM serves no draft that reads states of several layers, as Eagle3 and DFlash do"
    if 0 in drafted_layers(runner) and not torch.empty(0, device=runner.device).is_cpu:
        return (
            "the draft reads the embeddings (layer 0), which vLLM's kernels on accelerators change in place"
        )
    if getattr(runner.speculative_config, "enable_adaptive_verification", False):
        return "this vLLM verifies adaptively, so the host does not know which rows of a request it runs"
    if not isinstance(runner.vllm_config.additional_config, dict):
        return "this vLLM's additional_config is no dictionary, and compiled code is distinguished by it"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "this vLLM is pipeline-parallel or data-parallel; states are captured only without either"
    if max(getattr(parallel, f"{name}_context_parallel_size", 1) for name in ("prefill", "decode")) > 1:
        return "this vLLM is context-parallel; states are captured only without it"
    return ""
