"""The process that receives the features of a capture and writes them, where engines have processes of their own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from spec_trainer.capture.capture_run import plan_capture, write_shards
from spec_trainer.data.store import open_dataset
from spec_trainer.feature_stream import FeatureStream
from spec_trainer.launch.trainer_process import LauncherSide, released
from spec_trainer.resolve import resolve_parts
from spec_trainer.stop_request import Interrupted

if TYPE_CHECKING:
    from contextlib import ExitStack

    from spec_core.processes.control import ControlChannel, Record


def run(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Stands where a trainer rank stands in training, and speaks as one with the launcher."""
    launcher = LauncherSide(channel)
    capture = plan_capture(resolve_parts(order["config"]), open_dataset(order["dataset"]))
    spec = capture.run
    if order["memory_fraction"] is not None:
        spec.backend.limit_memory(order["memory_fraction"])
    spec.backend.device(0)  # binds this process to its device, which the transport uses
    transport = spec.backend.transport(spec.config.placement.kind)
    receiver = stack.enter_context(transport.listen(spec.schema, spec.window_bytes))
    freed = functools.partial(released, channel)
    stream = FeatureStream(spec.schedule, 0, receiver, spec.schema, spec.config, torch.device("cpu"), freed)
    channel.send("ready", address=receiver.address, done_steps=0)
    launcher.wait("start", spec.config.timeouts.start_s)
    try:
        write_shards(capture, stream, launcher.should_stop, launcher.show)
    except Interrupted as stopped:
        channel.send("interrupted", message=str(stopped))
    else:
        channel.send("finished")
    launcher.wait("stop")  # until then engines may hold its memory
