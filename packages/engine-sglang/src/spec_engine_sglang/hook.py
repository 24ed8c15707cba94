"""Entry point ``sglang.srt.plugins``: SGLang calls ``register`` in each of its processes, on every start.

It does nothing, and imports nothing, unless a capturing ``SglangEngine`` started this SGLang, which the environment
then says. In that case the scheduler, which holds the model, gets a ``StateCapture``.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

PLUGIN = "spec-trainer"
"""The entry point's name."""
NORM_VARIABLE = "SPEC_TRAINER_SGLANG_NORM"
"""Environment variable of a capturing SGLang: the attribute of the decoder that is its final norm."""
_WHITELIST = "SGLANG_PLUGINS"
"""SGLang's own variable: if set, only the plugins in it are loaded (a platform's plugin belongs there, too)."""
_SWITCH_S = 5e-4
"""Python's thread switch interval. SGLang's scheduler polls without a pause: at the default of 5 ms, the exporter's
threads would wait that long each time."""


def hook_environment(norm: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what the processes of a capturing SGLang need beside the address of the capture controller."""
    needed = {NORM_VARIABLE: norm}
    if listed := inherited.get(_WHITELIST):
        needed[_WHITELIST] = f"{listed},{PLUGIN}"
    return needed


def register() -> None:
    """Register ``attach_capture`` with SGLang, if this SGLang captures."""
    if NORM_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # By then the model is loaded and every graph captured; SGLang registers its own forward hooks at that point too.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", attach_capture, HookType.AFTER)


def attach_capture(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Start to capture, after ``Scheduler.__init__``.

    Every rank of a tensor-parallel group holds all states: the first captures.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    from spec_core.hosting import CAPTURE_VARIABLE, FeatureExporter
    from spec_engine_sglang.state_capture import StateCapture

    sys.setswitchinterval(_SWITCH_S)
    exporter = FeatureExporter(os.environ[CAPTURE_VARIABLE])
    runner = scheduler.tp_worker.model_runner
    capture = StateCapture(runner.model, exporter, exporter.schema, os.environ[NORM_VARIABLE])
    runner.forward = capture.around(runner.forward)
    log.info("capture of layers %s: %s", list(exporter.schema.layers), capture.description)
