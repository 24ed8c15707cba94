"""Entry point ``sglang.srt.plugins``: SGLang calls ``register`` in each of its processes, on every start.

It does nothing, and imports nothing, unless the environment says that a capturing ``SglangEngine`` started this
SGLang, or that its draft takes fresh weights. In the first case the scheduler, which holds the model, gets a
``StateCapture``; in the second it answers calls about its draft, and a server gets routes for them.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

PLUGIN = "spec-trainer"
"""The entry point's name."""
NORM_VARIABLE = "SPEC_TRAINER_SGLANG_NORM"
"""Environment variable of a capturing SGLang: the attribute of the decoder that is its final norm."""
_TOKEN_VARIABLE = "SPEC_DRAFT_TOKEN"
"""``spec_kit.hosting.DRAFT_TOKEN_VARIABLE``: set where the draft takes fresh weights."""
_WHITELIST = "SGLANG_PLUGINS"
"""SGLang's own variable: if set, only the plugins in it are loaded (a platform's plugin belongs there, too)."""
_SWITCH_S = 5e-4
"""Python's thread switch interval. SGLang's scheduler polls without a pause: at the default of 5 ms, our threads in
its process would wait that long each time, and it for them."""


def hook_environment(norm: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what the processes of a capturing SGLang need beside the address of the capture controller."""
    return {NORM_VARIABLE: norm, **_admission(inherited)}


def update_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what the processes of an SGLang need whose draft takes fresh weights from the engine alone."""
    return {_TOKEN_VARIABLE: secrets.token_hex(), **_admission(inherited)}


def _admission(inherited: Mapping[str, str]) -> dict[str, str]:
    listed = inherited.get(_WHITELIST)
    return {_WHITELIST: f"{listed},{PLUGIN}"} if listed else {}


def register() -> None:
    """Register what this SGLang needs, if anything."""
    if NORM_VARIABLE in os.environ:
        _register_capture()
    if os.environ.get(_TOKEN_VARIABLE):
        _register_updates()


def _register_capture() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # By then the model is loaded and every graph captured; SGLang registers its own forward hooks at that point too.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", attach_capture, HookType.AFTER)


def _register_updates() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from spec_engine_sglang import scheduler_updates

    managers = "sglang.srt.managers"
    for name, hook, kind in (
        (
            f"{managers}.scheduler.Scheduler.get_internal_state",
            scheduler_updates.answer_state,
            HookType.AROUND,
        ),
        (
            f"{managers}.schedule_batch.Req.update_spec_correct_drafts_histogram",
            scheduler_updates.count_verification,
            HookType.AFTER,
        ),
        (
            f"{managers}.schedule_batch.Req.__init__",
            scheduler_updates.keep_prefixes_apart,
            HookType.AFTER,
        ),
        (
            f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
            scheduler_updates.forget_draft,
            HookType.AROUND,
        ),
        ("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", add_routes, HookType.AFTER),
    ):
        HookRegistry.register(name, hook, kind)


def add_routes(launched: Any, *args: Any, **kwargs: Any) -> None:
    """Add the routes to the server's application, if this process is a server; after its schedulers have started."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None and launched[0] is not None:
        from spec_engine_sglang.draft_ranks import SglangRoutes

        server.app.add_middleware(SglangRoutes, tokenizer_manager=launched[0])


def attach_capture(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Start to capture, after ``Scheduler.__init__``.

    Every rank of a tensor-parallel group holds all states: the first captures.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    from spec_engine_sglang.state_capture import StateCapture
    from spec_kit.hosting import CAPTURE_VARIABLE, FeatureExporter

    sys.setswitchinterval(_SWITCH_S)
    exporter = FeatureExporter(os.environ[CAPTURE_VARIABLE])
    runner = scheduler.tp_worker.model_runner
    capture = StateCapture(runner.model, exporter, exporter.schema, os.environ[NORM_VARIABLE])
    runner.forward = capture.around(runner.forward)
    log.info("capture of layers %s: %s", list(exporter.schema.layers), capture.description)
