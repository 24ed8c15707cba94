"""ServingCapture: a vLLM server keeps the hidden states that it computes for the requests it serves.

vLLM's model runner returns the states of the layers that the draft reads. ServingCapture adds the input of the final
norm to these layers, and takes it out again before the drafter sees them. After each forward pass it copies the rows
of marked requests into StateRows. vLLM's older model runner is supported, which runs on CPUs and, if the variable
``VLLM_USE_V2_MODEL_RUNNER`` is 0, on GPUs.

Shapes: T rows of a step, N captured layers, H hidden size.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spec_core.records import FeatureSchema
from spec_engine_vllm.state_rows import StateRows, marked
from spec_kit.hosting import LiveRequestsConfig, StatesRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_kit.hosting import Fields

log = logging.getLogger(__name__)

_CAPTURE = "_spec_capture"
"""Name of the model runner's attribute that holds its ServingCapture, or the reason why it has none."""
_SET_UP = "_setup_eagle3_aux_hidden_state_outputs"
"""Method of vLLM's model runner that chooses the layers whose states the target returns. It runs once, after the
target was loaded and before anything is compiled."""
_MOST_PENDING = 8
"""Steps whose rows may be on their way from the device at once; the rows of further steps are left out."""


def capture_if_asked() -> None:
    """Have vLLM's model runner capture states, if the environment of this process asks for it."""
    config = LiveRequestsConfig.from_environment()
    if config is None or not config.states_bytes:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    set_up = getattr(GPUModelRunner, _SET_UP, None)
    if set_up is None or hasattr(set_up, "__wrapped__"):
        return

    @functools.wraps(set_up)
    def set_up_and_capture(runner: Any) -> None:
        set_up(runner)
        if hasattr(runner, _CAPTURE):
            return
        reason = _reason_against(runner)
        setattr(runner, _CAPTURE, reason or ServingCapture(runner, config))
        if reason:
            log.warning("no states of requests are captured: %s", reason)

    setattr(GPUModelRunner, _SET_UP, set_up_and_capture)


def states_of(runner: Any, asked: str) -> Fields | None:
    """Return the answer to a call for states: of this rank, or None if another rank answers.

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
    "vLLM's workers capture no states; start vLLM with states_bytes in SPEC_LIVE_REQUESTS, with the worker extension "
    "and, on a GPU, with VLLM_USE_V2_MODEL_RUNNER=0"
)


class ServingCapture:
    """Copies the rows of marked requests after each forward pass of one model runner."""

    def __init__(self, runner: Any, config: LiveRequestsConfig) -> None:
        """Add the final norm's input to the states that the target returns; wrap ``runner.execute_model``."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        drafted, num_layers = _drafted_layers(runner), runner.model_config.hf_text_config.num_hidden_layers
        layers = sorted({*drafted, num_layers})
        runner.model.set_aux_hidden_state_layers(tuple(layers))
        self._runner, self._num_drafted = runner, len(set(drafted))
        self._rows: StateRows | None = None
        if get_tensor_model_parallel_rank() == 0:  # every rank has whole states
            dtype = str(runner.model_config.dtype).removeprefix("torch.")
            hidden_size = runner.model_config.get_hidden_size()
            schema = FeatureSchema(layers=tuple(layers), hidden_size=hidden_size, dtype=dtype)
            self._rows = StateRows(schema, config.states_bytes, config.age_s)
        self._pending: deque[_Step] = deque()
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the model runner; capture its rows."""
        result = self._execute(scheduler_output, *args, **kwargs)
        state = self._runner.execute_model_state
        aux_hidden_states = None if state is None else state.aux_hidden_states
        if aux_hidden_states is not None:
            drafted = aux_hidden_states[: self._num_drafted]
            self._runner.execute_model_state = state._replace(aux_hidden_states=drafted)
        if self._rows is not None:
            try:
                self._note(self._rows, scheduler_output, aux_hidden_states)
            except Exception:
                log.exception("states of a step were not captured")
                self._rows.leave_out(list(scheduler_output.num_scheduled_tokens), "error")
        return result

    def answer(self, asked: str) -> Fields:
        """Return the layout of states, or a piece of a request's states; see ``states_of``."""
        assert self._rows is not None
        if not asked:
            return self._rows.layout()
        self._write_arrived(self._rows, is_late=True)
        return self._rows.read(StatesRange.decode(asked))

    def _note(
        self, rows: StateRows, scheduler_output: Any, aux_hidden_states: Sequence[Tensor] | None
    ) -> None:
        """Note which requests begin and end, and copy the rows of this step."""
        for request_id in scheduler_output.finished_req_ids:
            if any(request_id == span.request_id for step in self._pending for span in step.spans):
                self._write_arrived(rows, is_late=True)
            rows.end(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            if key := marked(getattr(new.sampling_params, "extra_args", None)):
                rows.begin(new.req_id, key)
        self._write_arrived(rows)
        if aux_hidden_states is not None and (spans := self._spans(rows, scheduler_output)):
            if len(self._pending) >= _MOST_PENDING:
                rows.leave_out([span.request_id for span in spans], "slow_copy")
            else:
                self._pending.append(self._copied(spans, aux_hidden_states))
                self._write_arrived(rows)
        rows.expire()

    def _spans(self, rows: StateRows, scheduler_output: Any) -> list[_Span]:
        """Return the rows of this step that are to be captured, in the order of the batch."""
        spans, start = [], 0
        for request_id in self._runner.input_batch.req_ids:
            stop = start + scheduler_output.num_scheduled_tokens[request_id]
            if rows.wants(request_id):
                spans.append(_Span(request_id, start, stop))
            start = stop
        return spans

    def _copied(self, spans: list[_Span], aux_hidden_states: Sequence[Tensor]) -> _Step:
        """Begin to copy rows to the host, without waiting for the device.

        The positions and tokens are the device's: vLLM's own copies on the host may be ahead of what was accepted.
        """
        stop = spans[-1].stop
        positions = self._runner._get_positions(stop)
        positions_T = positions if positions.dim() == 1 else positions[0]  # one of three equal rows for text
        inputs = torch.stack([positions_T.to(torch.int64), self._runner.input_ids.gpu[:stop].to(torch.int64)])
        parts = [torch.stack([part[one.start : one.stop] for part in aux_hidden_states], 1) for one in spans]
        hidden_TNH = torch.cat(parts)
        ready = None
        if not hidden_TNH.is_cpu:
            hidden_TNH, inputs = (one.to("cpu", non_blocking=True) for one in (hidden_TNH, inputs))
            ready = torch.Event(self._runner.device)
            ready.record()
        return _Step(spans, inputs, hidden_TNH, ready)

    def _write_arrived(self, rows: StateRows, is_late: bool = False) -> None:
        """Write the rows of steps that have arrived, in order; ``is_late``: wait for those that have not."""
        while self._pending:
            ready = self._pending[0].ready
            if ready is not None and not ready.query():
                if not is_late:
                    return
                ready.synchronize()
            self._pending.popleft().write(rows)


@dataclass(frozen=True)
class _Span:
    """Rows of one request in a step's batch."""

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Step:
    """Copies of a step's rows on the host, or on their way to it."""

    spans: list[_Span]
    inputs: Tensor
    """int64 [2, T]: positions and token ids of the whole batch."""
    hidden_TNH: Tensor
    """The rows of all spans, one after the other."""
    ready: torch.Event | None
    """Event after the copy; None on a CPU."""

    def write(self, rows: StateRows) -> None:
        """Write the rows of each request."""
        positions, token_ids = self.inputs.tolist()
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            ids = token_ids[span.start : span.stop]
            rows.write(span.request_id, positions[span.start], ids, self.hidden_TNH[start:stop])
            start = stop


def _drafted_layers(runner: Any) -> tuple[int, ...]:
    """Return the layers whose states the draft reads, as vLLM's model runner has chosen them."""
    layers = runner._get_eagle3_aux_layers_from_config()
    return tuple(layers or runner.model.get_eagle3_default_aux_hidden_state_layers())


def _reason_against(runner: Any) -> str:
    """Return why states cannot be captured in this vLLM; empty if they can."""
    parallel = runner.vllm_config.parallel_config
    if not runner.use_aux_hidden_state_outputs:
        return "this vLLM serves no draft that reads states of several layers, as Eagle3 and DFlash do"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "this vLLM is pipeline-parallel or data-parallel; states are captured only without either"
    if max(getattr(parallel, f"{name}_context_parallel_size", 1) for name in ("prefill", "decode")) > 1:
        return "this vLLM is context-parallel; states are captured only without it"
    return ""
