"""This worker program receives the features of a capture and writes them, instead of a trainer rank."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from spec_trainer.data.store import open_dataset
from spec_trainer.plan.resolve import resolve_parts
from spec_trainer.training.wiring import rank_features
from spec_trainer.workers.capture_run import plan_capture, write_shards
from spec_trainer.workers.dataset_copy import check_sees_run_directory
from spec_trainer.workers.protocol import WorkerOrder
from spec_trainer.workers.trainer_worker import RankLink
from spec_trainer.workers.worker_main import ControllerLink


def run_writer(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Receive and write every missing shard."""
    link = RankLink(controller, order)
    check_sees_run_directory(order)
    capture = plan_capture(resolve_parts(order.config), open_dataset(order.dataset))
    spec = capture.run
    if order.memory_fraction is not None:
        spec.backend.limit_memory(order.memory_fraction)
    spec.backend.device(0)  # binds this process to its device, which the transport uses
    features = stack.enter_context(rank_features(spec, 0, torch.device("cpu"), controller.address_elsewhere))
    stream = features.stream(spec, link.released)
    link.work(features.address, 0, lambda: write_shards(capture, stream, link.should_stop, link.show))
