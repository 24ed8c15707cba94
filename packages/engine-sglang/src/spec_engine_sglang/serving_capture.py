"""PassCapture makes an SGLang server keep the hidden states of the requests that it serves.

It runs in SGLang's scheduler process, by functions that are hooked into SGLang. With a draft that reads states
of several layers, SGLang's target returns these states for all rows of a pass, and NormTap has the input of
the final norm. After each pass of the target, the rows of requests that are marked for capture are copied into
StateRows. The copies run on the stream of the pass, before the next pass overwrites the buffers of graphs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spec_core.errors import EngineError, SpecError
from spec_core.records import FeatureSchema
from spec_engine_sglang.norm_tap import NormTap
from spec_engine_sglang.scheduler_updates import chosen, model_folder
from spec_engine_sglang.stream_taps import find_decoder
from spec_kit.hosting import Fields
from spec_kit.live_traffic import LiveRequestsConfig, StateCopies, StateRows, StepBatch, states_key

log = logging.getLogger(__name__)

STATES = "spec_states"
"""Key of the answer in the scheduler's internal state."""
_MARK = "spec-states:"
_SPARE_ROWS = 256
"""Rows of NormTap's buffer beyond the largest graph. SGLang may round up a graph's rows to a multiple."""
_DIVIDING = (
    "pp_size",
    "dp_size",
    "attn_cp_size",
    "dcp_size",
)
"""Arguments of SGLang that divide layers or rows among processes if they are above 1."""
_OTHERWISE_RUN = (
    "enable_dp_attention",
    "enable_prefill_cp",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "enable_torch_compile",
)
"""Arguments of SGLang with which a pass does not compute the rows of all its requests in order, or not in
Python."""


class _Running(NamedTuple):
    """A request of SGLang that is captured."""

    key: str
    request: weakref.ref[Any]

    @property
    def is_over(self) -> bool:
        """Whether the request has ended. SGLang drops an aborted request without ending it."""
        request = self.request()
        return request is None or request.finished()


class PassCapture:
    """Copies the rows of requests that are marked for capture, after each pass of the target."""

    def __init__(self, runner: Any, tap: NormTap, decoder: Any, config: LiveRequestsConfig) -> None:
        """Wrap ``runner.forward``. ``decoder``: the module of the target that has its layers."""
        num_layers = len(decoder.layers)
        drafted = decoder.layers_to_capture
        layers = tuple(sorted({layer for layer in drafted if layer < num_layers}))
        hidden_size = runner.model_config.hidden_size
        dtype = str(runner.dtype).removeprefix("torch.")
        schema = FeatureSchema(layers=(*layers, num_layers), hidden_size=hidden_size, dtype=dtype)
        self._copies = StateCopies(StateRows(schema, config.states_bytes, config.age_s))
        self._widths = {len(layers) * hidden_size, len(set(drafted)) * hidden_size}
        self._num_drafted = len(layers)
        self._hidden_size = hidden_size
        self._tap = tap
        self._running: dict[str, _Running] = {}
        """SGLang's request id → request. Ids come from clients, so only ``key`` names states."""
        self._forward = runner.forward
        runner.forward = self.forward

    def begin(self, key: str, request: Any) -> None:
        """Capture a request of SGLang from now on."""
        self._note_ends()
        if (former := self._running.pop(request.rid, None)) is not None:
            self._copies.end(former.key)
        if self._copies.rows.begin(key):
            self._running[request.rid] = _Running(key, weakref.ref(request))

    def forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a pass of the target and capture its states."""
        batch = None
        try:
            self._note_ends()
            batch = pass_batch(forward_batch, self._wanted())
            if batch is not None:
                self._tap.open(sum(batch.lengths))
        except Exception:  # noqa: BLE001 (``fail`` logs it)
            batch = None
            self._fail("states of a pass cannot be captured")
        result = self._forward(forward_batch, *args, **kwargs)
        if batch is not None:
            try:
                self._copy(batch, result.logits_output.hidden_states)
            except Exception:  # noqa: BLE001 (``fail`` logs it)
                self._fail("states of a pass were not captured")
        return result

    def answer(self, asked: str) -> Fields:
        """Return the layout of states, or a piece of a request's states. ``asked``: see ``answer_states``."""
        self._note_ends()
        return self._copies.answer(asked)

    def _copy(self, batch: StepBatch, drafted: Any) -> None:
        """Begin to copy the rows of a pass. ``drafted``: states that the target has returned to the draft."""
        num_rows = sum(batch.lengths)
        last_RH = self._tap.close(num_rows)
        if drafted is None or len(drafted) < num_rows or drafted.shape[1] not in self._widths:
            shape = None if drafted is None else list(drafted.shape)
            raise EngineError(
                f"SGLang's target returned states of shape {shape}, expected {num_rows} rows of {self._widths}"
            )
        drafted_RNH = drafted[:num_rows].unflatten(1, (-1, self._hidden_size))
        self._copies.add(batch, [*drafted_RNH.unbind(1)[: self._num_drafted], last_RH])
        self._copies.write_arrived()
        self._copies.rows.expire()

    def _wanted(self) -> dict[str, str]:
        """Return SGLang's ids of the requests whose rows must be copied, and the keys of these requests."""
        wants = self._copies.rows.wants
        return {name: running.key for name, running in self._running.items() if wants(running.key)}

    def _note_ends(self) -> None:
        for request_id in [name for name, running in self._running.items() if running.is_over]:
            self._copies.end(self._running.pop(request_id).key)

    def _fail(self, failure: str) -> None:
        """Leave out all requests that run, after an exception."""
        self._copies.fail([running.key for running in self._running.values()], failure)


class _Process:
    """A scheduler's process captures the states of one target, or has a reason why it does not."""

    tap: NormTap | None = None
    capture: PassCapture | None = None
    reason: str = "SGLang captures no states; start it with states_bytes in SPEC_LIVE_REQUESTS"
    """Why there is no capture."""


_process = _Process()


def pass_batch(forward_batch: Any, wanted: Mapping[str, str]) -> StepBatch | None:
    """Return the batch that a pass of the target computes; None if it has no rows to be captured.

    ``wanted``: SGLang's id of a request to be captured -> its name in the batch. Other requests have an empty
    name there.
    """
    mode = forward_batch.forward_mode
    names = (forward_batch.rids or ()) if wanted else ()
    keys = [wanted.get(name, "") for name in names]
    if not any(keys):
        return None
    positions, token_ids = forward_batch.positions, forward_batch.input_ids
    if mode.is_target_verify():
        width, rest = divmod(len(token_ids), len(keys))
        if rest or getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None:
            raise EngineError("SGLang verifies different numbers of guesses for the requests of a batch")
        return StepBatch(keys, [width] * len(keys), positions, token_ids)
    if mode.is_extend() and forward_batch.extend_seq_lens_cpu is not None:
        lengths = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        return StepBatch(keys, lengths, positions, token_ids)
    return None


def configuration() -> LiveRequestsConfig | None:
    """Return the configuration of a server that captures states; None if it does not."""
    try:
        config = LiveRequestsConfig.from_environment()
    except SpecError:  # a server's frontend has refused it already
        return None
    return config if config is not None and config.states_bytes else None


def attach_tap(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Hook the final norm of the target; SGLang's hook calls this after ``ModelRunner.load_model``.

    SGLang records its graphs later. In a tensor-parallel group, the first rank captures.
    """
    config = configuration()
    if config is None or runner.is_draft_worker or _is_other_rank():
        return
    try:
        arguments = chosen(runner.server_args)
        if reason := _reason_against(arguments, runner.device):
            raise EngineError(reason)
        norm = _final_norm(runner)
        hidden_size = runner.model_config.hidden_size
        like = torch.empty(0, hidden_size, dtype=runner.dtype, device=next(norm.parameters()).device)
        _process.tap = NormTap(norm, _graph_rows(arguments), like)
    except Exception as error:  # noqa: BLE001 (whatever it is, SGLang serves)
        _refuse(error)


def begin_capture(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Capture states from now on; SGLang's hook calls this after ``Scheduler.__init__``."""
    config = configuration()
    if config is None or _process.tap is None:
        return
    try:
        runner = scheduler.tp_worker.model_runner
        _, decoder = find_decoder(runner.model, _norm_name(runner))
        drafted = getattr(decoder, "layers_to_capture", None)
        if not drafted:
            raise EngineError(
                "this SGLang serves no draft that reads states of several layers, as Eagle3 and DFlash do"
            )
        if 0 in drafted and not _is_host(runner.device):
            raise EngineError(
                "the draft reads the embeddings (layer 0), which SGLang's kernels change in place"
            )
        _process.capture = PassCapture(runner, _process.tap, decoder, config)
    except Exception as error:  # noqa: BLE001 (whatever it is, SGLang serves)
        _refuse(error)


def begin_request(result: None, request: Any, *args: Any, **kwargs: Any) -> None:
    """Capture a request that is marked, and remove the mark; SGLang's hook calls this after ``Req.__init__``."""
    try:
        key = states_key(request.sampling_params.custom_params)
        if key is None:
            return
        request.sampling_params.custom_params = None  # only requests without such parameters are marked
        if _process.capture is not None:
            _process.capture.begin(key, request)
    except Exception:  # an exception here would end the scheduler and thus the server
        log.exception("states of a request are not captured")


def states_request_id(asked: str) -> str:
    """Return a request id that asks for states. ``asked``: see ``answer_states``."""
    return _MARK + asked


def answer_states(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Answer a call for states; wraps ``Scheduler.get_internal_state``.

    The call is a StatesRange as JSON, or an empty string for the layout.
    """
    if not (request.rid or "").startswith(_MARK):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    return GetInternalStateReqOutput(internal_state={STATES: _answer(request.rid.removeprefix(_MARK))})


def _answer(asked: str) -> Fields:
    if _process.capture is None:
        return {"refused": _process.reason}
    try:
        return _process.capture.answer(asked)
    except Exception as error:  # an exception here would end the scheduler and thus the server
        log.exception("states of a request")
        return {"refused": f"{type(error).__name__}: {error}"}


def _is_other_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() != 0


def _refuse(error: Exception) -> None:
    _process.tap = _process.capture = None
    _process.reason = str(error) if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
    log.warning("no states of requests are captured: %s", _process.reason)


def _norm_name(runner: Any) -> str:
    """Return the name of the decoder's attribute that is the final norm."""
    from spec_kit.targets import read_target

    return read_target(model_folder(runner.server_args.model_path)).norm_name.split(".")[-2]


def _final_norm(runner: Any) -> Any:
    name = _norm_name(runner)
    return getattr(find_decoder(runner.model, name)[1], name)


def _reason_against(arguments: Any, device: str) -> str:
    """Return why states cannot be captured with SGLang's ``arguments``; an empty string if they can."""
    if (arguments.speculative_eagle_topk or 1) > 1:
        return "this SGLang verifies trees of guesses; states are captured with --speculative-eagle-topk 1"
    set_ones = [name for name in _DIVIDING if (getattr(arguments, name, None) or 1) > 1]
    set_ones += [name for name in _OTHERWISE_RUN if getattr(arguments, name, False)]
    if set_ones:
        return f"SGLang captures no states with --{set_ones[0].replace('_', '-')}"
    if not _is_host(device) and "tc_piecewise" in _graph_backends(arguments):
        return "SGLang captures no states in graphs of torch.compile (backend tc_piecewise); use another one"
    return ""


def _is_host(device: str) -> bool:
    return torch.empty(0, device=device).is_cpu


def _graph_backends(arguments: Any) -> list[str]:
    config = arguments.cuda_graph_config
    return [] if config is None else [config.decode.backend, config.prefill.backend]


def _graph_rows(arguments: Any) -> int:
    """Return the largest number of rows of a graph that SGLang records with ``arguments``."""
    if set(_graph_backends(arguments)) <= {"disabled"}:
        return 0
    config = arguments.cuda_graph_config
    width = arguments.speculative_num_draft_tokens or 1
    sizes = [max(phase.bs or [phase.max_bs or 0]) for phase in (config.prefill, config.decode)]
    return max(sizes[0], sizes[1] * width) + _SPARE_ROWS
