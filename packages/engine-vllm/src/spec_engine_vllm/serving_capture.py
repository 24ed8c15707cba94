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
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from spec_core.records import FeatureSchema
from spec_engine_vllm.state_rows import StateRows, marked
from spec_engine_vllm.step_batch import StepBatch, drafted_layers
from spec_kit.hosting import LiveRequestsConfig, StatesRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

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
_MOST_PENDING = 8
"""Maximum number of steps whose rows are being copied from the device at the same time. The rows of further
steps are left out."""


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

        drafted, num_layers = drafted_layers(runner), runner.model_config.hf_text_config.num_hidden_layers
        layers = sorted({*drafted, num_layers})
        runner.model.set_aux_hidden_state_layers(tuple(layers))
        _name_compiled_code(runner, layers)
        self._runner, self._num_drafted = runner, len(set(drafted))
        self._rows: StateRows | None = None
        if get_tensor_model_parallel_rank() == 0:  # every rank has the complete states
            dtype = str(runner.model_config.dtype).removeprefix("torch.")
            hidden_size = runner.model_config.get_hidden_size()
            schema = FeatureSchema(layers=tuple(layers), hidden_size=hidden_size, dtype=dtype)
            self._rows = StateRows(schema, config.states_bytes, config.age_s)
        self._pending: deque[_Step] = deque()
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
        if self._rows is not None and not kwargs.get("dummy_run"):
            try:
                self._note(self._rows, scheduler_output, state if has_states else None)
            except Exception:
                log.exception("states of a step were not captured")
                self._rows.leave_out(list(scheduler_output.num_scheduled_tokens), "error")
        return result

    def answer(self, asked: str) -> Fields:
        """Return the layout of states, or a piece of a request's states. ``asked``: see ``states_of``."""
        assert self._rows is not None
        if not asked:
            return self._rows.layout()
        self._write_arrived(self._rows, is_late=True)
        return self._rows.read(StatesRange.decode(asked))

    def _note(self, rows: StateRows, scheduler_output: Any, state: Any) -> None:
        """Record which requests begin and end, and copy this step's rows.

        ``state``: the runner's state of this step; None if there are no rows to copy.
        """
        self._note_ends(rows, scheduler_output.finished_req_ids)
        self._note_beginnings(rows, scheduler_output)
        self._write_arrived(rows)
        if state is not None:
            batch = StepBatch.of(self._runner, state, scheduler_output.num_scheduled_tokens)
            spans = list(_spans(rows, batch))
            if spans and len(self._pending) >= _MOST_PENDING:
                rows.leave_out([span.request_id for span in spans], "slow_copy")
            elif spans:
                self._pending.append(self._copied(spans, batch, state.aux_hidden_states))
                self._write_arrived(rows)
        rows.expire()

    def _note_ends(self, rows: StateRows, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if any(request_id == span.request_id for step in self._pending for span in step.spans):
                self._write_arrived(rows, is_late=True)
            self._preempted.discard(request_id)
            rows.end(request_id)

    def _note_beginnings(self, rows: StateRows, scheduler_output: Any) -> None:
        """Record new requests. The second model runner also gets resumed requests as new: skip them."""
        self._preempted.update(filter(rows.has, scheduler_output.preempted_req_ids or ()))
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._preempted:
                self._preempted.discard(new.req_id)
            elif key := marked(getattr(new.sampling_params, "extra_args", None)):
                rows.begin(new.req_id, key)
        self._preempted.difference_update(scheduler_output.num_scheduled_tokens)

    def _copied(self, spans: list[_Span], batch: StepBatch, aux_hidden_states: Sequence[Tensor]) -> _Step:
        """Begin to copy the rows of ``spans`` to the host, without waiting for the device."""
        stop = spans[-1].stop
        inputs = torch.stack([part[:stop].to(torch.int64) for part in (batch.positions, batch.token_ids)])
        parts = [
            torch.stack([part[first:last] for part in aux_hidden_states], 1) for first, last in _runs(spans)
        ]
        hidden_TNH = parts[0] if len(parts) == 1 else torch.cat(parts)
        ready = None
        if not hidden_TNH.is_cpu:
            # Without ``non_blocking`` this thread would wait; with it, host memory is pinned.
            hidden_TNH, inputs = (one.to("cpu", non_blocking=True) for one in (hidden_TNH, inputs))
            ready = torch.Event(self._runner.device)
            ready.record()
        return _Step(spans, inputs, hidden_TNH, ready)

    def _write_arrived(self, rows: StateRows, is_late: bool = False) -> None:
        """Write the rows of steps whose copies are complete, in order.

        ``is_late``: whether to wait for copies that are not complete.
        """
        while self._pending:
            ready = self._pending[0].ready
            if ready is not None and not ready.query():
                if not is_late:
                    return
                ready.synchronize()
            self._pending.popleft().write(rows)


@dataclass(frozen=True)
class _Span:
    """A range of rows of one request in a step's batch."""

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Step:
    """Copies of a step's rows on the host, which may not be complete yet."""

    spans: list[_Span]
    inputs: Tensor
    """int64 [2, T]: positions and token ids of the whole batch."""
    hidden_TNH: Tensor
    """The rows of all spans, one after the other."""
    ready: torch.Event | None
    """Event that follows the copy on its stream; None on a CPU."""

    def write(self, rows: StateRows) -> None:
        """Write the rows of each request."""
        positions, token_ids = self.inputs.tolist()
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            ids = token_ids[span.start : span.stop]
            rows.write(span.request_id, positions[span.start], ids, self.hidden_TNH[start:stop])
            start = stop


def _name_compiled_code(runner: Any, layers: list[int]) -> None:
    """Make the file names of vLLM's compiled code depend on ``layers``.

    Otherwise vLLM would run code that was compiled for the draft's layers alone. The names are set in the
    configurations of all parts of the model, because the parts of a multimodal target have their own.
    """
    for part in (runner, *runner.model.modules()):
        if (config := getattr(part, "vllm_config", None)) is not None:
            config.additional_config[_CACHE_KEY] = layers


def _spans(rows: StateRows, batch: StepBatch) -> Iterator[_Span]:
    """Yield the rows of a step that must be captured, in the order of the batch."""
    start = 0
    for request_id, length in zip(batch.request_ids, batch.lengths, strict=True):
        if rows.wants(request_id):
            yield _Span(request_id, start, start + length)
        start += length


def _runs(spans: list[_Span]) -> list[tuple[int, int]]:
    """Return the rows of spans as few ranges, in which adjacent spans are merged."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        first = runs.pop()[0] if runs and runs[-1][1] == span.start else span.start
        runs.append((first, span.stop))
    return runs


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
