"""Define ``register``, which each process of SGLang calls at its start.

The entry point ``sglang.srt.plugins`` names it. ``register`` does nothing and imports nothing, except in three
cases that environment variables indicate. In the first case, an ``SglangEngine`` that captures has started
this SGLang: the scheduler, which holds the model, gets a ``StateCapture``. In the second case, the draft
takes fresh weights: the scheduler answers calls about the draft, and a server gets HTTP routes for these
calls. In the third case, such a server also captures the states of requests: the scheduler gets a
``PassCapture``.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

PLUGIN = "spec-trainer"
"""Name of the entry point."""
NORM_VARIABLE = "SPEC_TRAINER_SGLANG_NORM"
"""Environment variable of an SGLang that captures: name of the decoder's attribute that is the final norm."""
IMAGE_VARIABLE = "SPEC_TRAINER_SGLANG_IMAGE_TOKEN"
"""Environment variable of an SGLang that captures: the argument ``image`` of ``StateCapture``, as numbers
separated by spaces."""
_TOKEN_VARIABLE = "SPEC_DRAFT_TOKEN"
"""``spec_kit.hosting.DRAFT_TOKEN_VARIABLE``: set if the draft takes fresh weights."""
_LIVE_VARIABLE = "SPEC_LIVE_REQUESTS"
"""``spec_kit.live_traffic.LIVE_REQUESTS_VARIABLE``: set if a server stores requests."""
_WHITELIST = "SGLANG_PLUGINS"
"""SGLang's own variable: if it is set, SGLang loads only the plugins that it lists. The plugin of a platform
must be listed, too."""
_SWITCH_S = 5e-4
"""Python's thread switch interval, in seconds. SGLang's scheduler polls without a pause. With the default of
5 ms, the scheduler and the capture threads of its process would wait up to 5 ms for each other at each
switch."""


def hook_environment(norm: str, inherited: Mapping[str, str], image: Sequence[int] = ()) -> dict[str, str]:
    """Return environment variables of an SGLang that captures, without the capture controller's address.

    ``norm`` and ``image`` are arguments of ``StateCapture``.
    """
    return {
        NORM_VARIABLE: norm,
        IMAGE_VARIABLE: " ".join(map(str, image)),
        **_admission(inherited),
    }


def update_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of an SGLang whose draft takes fresh weights only from the engine."""
    return {_TOKEN_VARIABLE: secrets.token_hex(), **_admission(inherited)}


def _admission(inherited: Mapping[str, str]) -> dict[str, str]:
    listed = inherited.get(_WHITELIST)
    return {_WHITELIST: f"{listed},{PLUGIN}"} if listed else {}


def register() -> None:
    """Register the hooks that this SGLang needs, if any."""
    if NORM_VARIABLE in os.environ:
        _register_capture()
    if os.environ.get(_TOKEN_VARIABLE):
        _register_updates()
        if os.environ.get(_LIVE_VARIABLE):
            _register_states()
    elif os.environ.get(_LIVE_VARIABLE):
        log.warning("no requests are stored: %s needs %s, too", _LIVE_VARIABLE, _TOKEN_VARIABLE)


def _register_capture() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from spec_engine_sglang.frozen_tables import answer_products

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    # By then the model is loaded and every graph captured; SGLang registers its forward hooks there, too.
    HookRegistry.register(f"{scheduler}.__init__", attach_capture, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.get_internal_state", answer_products, HookType.AROUND)


def _register_updates() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from spec_engine_sglang import guess_depths, scheduler_updates

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
        (f"{managers}.schedule_batch.Req.__init__", guess_depths.begin_answer, HookType.AFTER),
        (
            f"{managers}.schedule_batch.Req.update_spec_correct_drafts_histogram",
            guess_depths.note_verification,
            HookType.AFTER,
        ),
        (
            f"{managers}.schedule_batch.Req.update_spec_cap_lens_histogram",
            guess_depths.note_cap,
            HookType.AFTER,
        ),
        (
            f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
            scheduler_updates.forget_draft,
            HookType.AROUND,
        ),
        ("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", add_routes, HookType.AROUND),
    ):
        HookRegistry.register(name, hook, kind)


def _register_states() -> None:
    """Register the hooks that capture states, if the server's configuration requests it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from spec_engine_sglang import serving_capture

    if serving_capture.configuration() is None:
        return
    managers = "sglang.srt.managers"
    for name, hook, kind in (
        (
            "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
            serving_capture.attach_tap,
            HookType.AFTER,
        ),
        (f"{managers}.scheduler.Scheduler.__init__", serving_capture.begin_capture, HookType.AFTER),
        (f"{managers}.schedule_batch.Req.__init__", serving_capture.begin_request, HookType.AFTER),
        (
            f"{managers}.scheduler.Scheduler.get_internal_state",
            serving_capture.answer_states,
            HookType.AROUND,
        ),
    ):
        HookRegistry.register(name, hook, kind)


def add_routes(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Launch SGLang's processes; if this process is a server, add this project's routes to it.

    The environment may request that the server stores requests. If this SGLang cannot do so, this process
    ends before the launch.
    """
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None:
        return launch(*args, **kwargs)
    from spec_core.errors import SpecError
    from spec_engine_sglang.sglang_answers import check_storing
    from spec_engine_sglang.sglang_ranks import SglangRoutes

    try:
        check_storing(server.TokenizerManager, kwargs.get("server_args"))
    except SpecError as error:
        sys.exit(f"this SGLang was not started: {error}")
    launched = launch(*args, **kwargs)
    if launched[0] is not None:
        server.app.add_middleware(SglangRoutes, tokenizer_manager=launched[0])
    return launched


def attach_capture(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Start to capture states; SGLang's hook calls this after ``Scheduler.__init__``.

    Every rank of a tensor-parallel group has the complete states, so only the first rank captures.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    from spec_engine_sglang.state_capture import StateCapture
    from spec_kit.hosting import CAPTURE_VARIABLE, FeatureExporter

    sys.setswitchinterval(_SWITCH_S)
    exporter = FeatureExporter(os.environ[CAPTURE_VARIABLE])
    runner = scheduler.tp_worker.model_runner
    capture = StateCapture(
        runner.model,
        exporter,
        exporter.schema,
        os.environ[NORM_VARIABLE],
        [int(number) for number in os.environ[IMAGE_VARIABLE].split()],
    )
    runner.forward = capture.around(runner.forward)
    log.info("capture of layers %s: %s", list(exporter.schema.layers), capture.description)
