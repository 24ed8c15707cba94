"""``spec-trainer capture``: run the target over every sample once, and store the features in a folder."""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_core.errors import ArtifactError
from spec_core.wording import counted
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.offline.folder import FeatureFolder
from spec_trainer.plan import combinations
from spec_trainer.plan.resolve import read_inputs
from spec_trainer.run.batch_schedule import BatchSchedule
from spec_trainer.run.dispatch import check_sizes
from spec_trainer.workers.capture_run import CaptureRun, plan_capture, write_shards
from spec_trainer.workers.inline_driver import inline_driver
from spec_trainer.workers.worker_driver import worker_driver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from spec_trainer.configuration.run import AnyRunConfig
    from spec_trainer.run.batch_schedule import GlobalBatch
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.training.wiring import RankLinks
    from spec_trainer.workers.run_driver import RunDriver


log = logging.getLogger(__name__)

_WRITER_FRACTION = 0.1
"""Share of a device for the writer, which only holds features until they are copied to the host."""
_WRITER = ("writer", "spec_trainer.workers.writer_worker:run_writer")
"""Role and entry function of the worker that receives features instead of trainer ranks."""


def resolve_capture(
    config_file: Path | None, flags: Mapping[str, object], overrides: Sequence[str]
) -> CaptureRun:
    """Return the capture that a command line describes; create nothing.

    Raise UsageError, with a message of one line, if the command line or an input is wrong.
    """
    parts, dataset = read_inputs(config_file, flags, overrides, output_type=FeatureFolder)
    combinations.refuse(combinations.CAPTURE, parts.config)
    capture = plan_capture(replace(parts, config=_for_capture(parts.config)), dataset)
    check_sizes(capture.run.schedule, parts.schema, capture.run.window_bytes)
    capture.run.members()
    capture.folder.check_owner(capture.identity)
    capture.folder.check_shards(capture.identity, capture.num_shards)
    _check_space(capture)
    return capture


def run_capture(capture: CaptureRun) -> dict[str, Any]:
    """Capture the missing shards; return the command's result as a JSON-serializable dict."""
    started = time.monotonic()
    run = capture.run
    with capture.folder.locked(), StopRequest() as stop:
        capture.folder.open(capture.identity)
        missing = capture.missing()
        log.info(
            "%d of %d shards are to be captured: %d bytes into %s",
            len(missing), capture.num_shards, capture.num_bytes(missing), capture.folder.root,
        )  # fmt: skip
        if missing:
            with _driver(capture, stop) as driver:
                driver.train(run)
        capture.folder.seal(capture.identity, capture.num_shards)
    return _document(capture, missing, time.monotonic() - started)


def _driver(capture: CaptureRun, stop: StopRequest) -> AbstractContextManager[RunDriver]:
    """Return a driver that captures in this process, or in worker processes (engines and a writer)."""
    if capture.run.config.placement.kind != "inline":
        return worker_driver(capture.run, stop, _progress(capture), _WRITER)

    import torch

    def write(spec: RunSpec, rank: int, device: torch.device, links: RankLinks) -> None:
        links.work(0, lambda: write_shards(capture, links.stream, links.should_stop, links.show))

    return inline_driver(capture.run, stop, _progress(capture), write, torch.device("cpu"))


def _progress(capture: CaptureRun) -> StepProgress:
    def describe(record: Mapping[str, Any]) -> str:
        return f"{record['tokens_per_s']:,.0f} tok/s"

    return StepProgress(len(capture.missing()), "capturing shards", describe)


def _for_capture(config: AnyRunConfig) -> AnyRunConfig:
    """Return the configuration with one writer process instead of trainer ranks.

    The engine gets most of the device memory.
    """
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
            f"{counted(len(capture.run.dataset.samples), 'sample')}, {free} are free there; choose another disk, "
            "fewer samples or a smaller data.max_length"
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
