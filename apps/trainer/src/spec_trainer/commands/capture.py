"""``spec-trainer capture``: run the target over every sample once and keep its features in a folder."""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_core.errors import ArtifactError, ConfigError
from spec_trainer.capture.capture_run import CaptureRun, plan_capture, write_shards
from spec_trainer.command_line.progress import StepProgress
from spec_trainer.command_line.stop_request import StopRequest
from spec_trainer.resolve import read_inputs
from spec_trainer.run.batch_schedule import BatchSchedule
from spec_trainer.run.dispatch import check_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_trainer.config import AnyRunConfig
    from spec_trainer.run.batch_schedule import GlobalBatch


log = logging.getLogger(__name__)

_WRITER_FRACTION = 0.1
"""Share of a device that the writer has with an engine: it only holds features on their way to the host."""


def resolve_capture(
    config_file: Path | None, flags: Mapping[str, object], overrides: Sequence[str]
) -> CaptureRun:
    """Return the capture that a command line describes. Raise UsageError, one line; create nothing."""
    parts, dataset = read_inputs(config_file, flags, overrides)
    if parts.config.data.features is not None:
        raise ConfigError(
            f"data.features={parts.config.data.features} with capture, which makes such a folder; remove it, and "
            "name the folder with --output"
        )
    capture = plan_capture(replace(parts, config=_for_capture(parts.config)), dataset)
    check_sizes(capture.run.schedule, parts.schema, capture.run.window_bytes)
    capture.run.members()
    capture.folder.check_owner(capture.identity)
    capture.folder.check_shards(capture.identity, capture.num_shards)
    _check_space(capture)
    return capture


def run_capture(capture: CaptureRun) -> dict[str, Any]:
    """Capture the missing shards; return the command's document."""
    started = time.monotonic()
    run = capture.run
    capture_shards = _capture_inline if run.config.placement.kind == "inline" else _capture_by_workers
    with capture.folder.locked(), StopRequest() as stop:
        capture.folder.open(capture.identity)
        missing = capture.missing()
        log.info(
            "%d of %d shards are to be captured: %d bytes into %s",
            len(missing), capture.num_shards, capture.num_bytes(missing), capture.folder.root,
        )  # fmt: skip
        if missing:
            capture_shards(capture, stop)
        capture.folder.seal(capture.identity, capture.num_shards)
    return _document(capture, missing, time.monotonic() - started)


def _capture_inline(capture: CaptureRun, stop: StopRequest) -> None:
    """Capture with engine and disk in this process."""
    import torch

    from spec_trainer.training.wiring import inline_source

    with ExitStack() as stack:
        stack.enter_context(capture.run.backend.prepare_host("inline"))
        source = stack.enter_context(inline_source(capture.run, torch.device("cpu")))
        progress = stack.enter_context(_progress(capture))
        source.begin(0)
        write_shards(capture, source.stream, lambda done: stop.requested, progress.show)


def _capture_by_workers(capture: CaptureRun, stop: StopRequest) -> None:
    """Capture with engines in processes of their own, and one process that writes."""
    from spec_trainer.controller.run_controller import run_workers

    writer = ("writer", "spec_trainer.capture.writer_worker:run_writer")
    capture.run.directory.logs.mkdir(exist_ok=True)
    run_workers(capture.run, stop, _progress(capture), writer)


def _progress(capture: CaptureRun) -> StepProgress:
    def describe(record: Mapping[str, Any]) -> str:
        return f"{record['tokens_per_s']:,.0f} tok/s"

    return StepProgress(len(capture.missing()), "capturing shards", describe)


def _for_capture(config: AnyRunConfig) -> AnyRunConfig:
    """Return the configuration with one writer in place of the ranks, which leaves its device to the engine."""
    placement = config.placement
    if placement.kind == "colocated" and placement.engine_fraction is placement.trainer_fraction is None:
        placement = placement.model_copy(update={"trainer_fraction": _WRITER_FRACTION})
    train = config.train.model_copy(update={"ranks": 1, "serve_every": 0})
    return config.model_copy(update={"train": train, "placement": placement})


def _check_space(capture: CaptureRun) -> None:
    root = capture.folder.root.absolute()
    needed = capture.num_bytes(capture.missing())
    there = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ArtifactError(
            f"output {capture.folder.root} needs {needed} bytes for the features of "
            f"{len(capture.run.dataset.samples)} samples, {free} are free there; choose another disk, fewer samples "
            "or a smaller data.max_length"
        )


def _document(capture: CaptureRun, captured: Sequence[GlobalBatch], wall_s: float) -> dict[str, Any]:
    everything = list(BatchSchedule.items(capture.run.schedule, 0))
    return {
        "features": str(capture.folder.root),
        "layers": list(capture.run.schema.layers),
        "samples": len(capture.run.dataset.samples),
        "tokens": capture.num_tokens(everything),
        "bytes": capture.num_bytes(everything),
        "shards": capture.num_shards,
        "captured_shards": len(captured),
        "captured_tokens": capture.num_tokens(captured),
        "wall_s": wall_s,
    }
