"""Entry point ``sglang.srt.plugins``: SGLang calls ``register`` in each of its processes, on every start.

It does nothing, and imports nothing, unless a capturing ``SglangEngine`` started this SGLang and says so in the
environment. Then the scheduler, which holds the model, gets a ``StateCapture``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

PLUGIN = "spec-trainer"
"""The entry point's name."""
ORDER = "SPEC_TRAINER_SGLANG_CAPTURE"
_WHITELIST = "SGLANG_PLUGINS"
"""SGLang's own: if set, only the plugins in it are loaded (and, with a platform's plugin, its name belongs there)."""
_CONNECT_S = 30.0
_SWITCH_S = 5e-4
"""SGLang's scheduler polls without a pause. At Python's default of 5 ms, the outlet's threads would wait that long
for each of their turns."""


def environment(address: str, norm: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the processes of a capturing SGLang need. ``address``: of the CaptureDesk; ``norm``: attribute of the
    decoder that is its final norm."""
    order = {ORDER: json.dumps({"address": address, "norm": norm})}
    if listed := inherited.get(_WHITELIST):
        order[_WHITELIST] = f"{listed},{PLUGIN}"
    return order


def register() -> None:
    if ORDER not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # By then the model is loaded and every graph captured; SGLang registers its own forward hooks at that point too.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", attach, HookType.AFTER)


def attach(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.__init__``. Every rank of a tensor-parallel group holds all states: the first captures."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    from spec_core.hosting.capture_outlet import CaptureOutlet
    from spec_engine_sglang.state_capture import StateCapture

    sys.setswitchinterval(_SWITCH_S)
    order = json.loads(os.environ[ORDER])
    outlet = CaptureOutlet(order["address"], _CONNECT_S)
    runner = scheduler.tp_worker.model_runner
    capture = StateCapture(runner.model, outlet, outlet.schema, order["norm"])
    runner.forward = capture.around(runner.forward)
    log.info("capture of layers %s: %s", list(outlet.schema.layers), capture.description)
