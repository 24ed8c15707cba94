"""Estimate a run's hours from the time of its steps so far, or give a lower bound from its FLOPs."""

from __future__ import annotations

import time
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

from spec_core import Backend
from spec_core.wording import counted
from spec_kit.targets import stored_tensors
from spec_trainer.run.metrics import read_metrics

if TYPE_CHECKING:
    import torch

    from spec_trainer.plan.memory import RunSizes
    from spec_trainer.run.spec import RunSpec

_LAST_STEPS = 20
_FEWEST_STEPS = 3
_WIDEST = 8192
_PRODUCT_S = 0.003
"""If one matrix product takes more than these seconds, no wider product is measured."""
_MEASURED_S = 0.2
_ACCELERATOR_FLOPS = 1e15
"""FLOP/s in bfloat16 that no supported accelerator exceeds: the peak of an H100 or H200 without sparsity."""


def expected_time(run: RunSpec, sizes: RunSizes) -> dict[str, Any]:
    """Estimate the hours that a run takes, or give a lower bound; say on what the number rests.

    Return {"hours" or "hours_at_least", "rests_on"}; the first key is missing if no time can be given. The
    hours of a resumed run are estimated from the times in its metrics. Otherwise a lower bound of the FLOPs
    is divided by the device's FLOP/s. On a CPU these are measured with a matrix product. For an accelerator
    they are assumed, because ``plan`` opens no device.
    """
    done = _recorded(run)
    if len(done) >= _FEWEST_STEPS:
        pace_s = median(row["time_data_s"] + row["time_step_s"] for row in done)
        left = run.schedule.total_steps - done[-1]["step"]
        return {
            "hours": _hours(left * pace_s),
            "rests_on": f"the median of the last {counted(len(done), 'step')} of this run, {pace_s:.2f} s; "
            f"steps left: {left}",
        }
    if run.config.decode.every:
        return {
            "rests_on": "nothing: the answers that the run trains on are not known; its progress shows it"
        }
    flops = _least_flops(run, sizes)
    measured = run.backend.device_type == Backend.device_type  # the default: a CPU
    rate = _product_flops_per_s(run) if measured else _ACCELERATOR_FLOPS
    speed = "which a matrix product has reached just now" if measured else "more than any such device reaches"
    devices = len({device for member in run.members() for device in member.devices}) or 1
    return {
        "hours_at_least": _hours(flops / rate / devices),
        "rests_on": f"{flops:.1e} FLOPs (2 for each weight of the target's layers and 6 for each of the draft's, for "
        f"each token) at {rate:.1e} FLOP/s on each of {counted(devices, 'device')}, {speed}; loss, "
        "attention, unrolled steps and waiting come on top, and the progress of the run shows the real pace",
    }


def _recorded(run: RunSpec) -> list[dict[str, Any]]:
    if run.directory.begun_as() != run.identity or not run.directory.metrics.exists():
        return []
    rows = read_metrics(run.directory.metrics)
    return [row for row in rows if "time_step_s" in row and "time_data_s" in row][-_LAST_STEPS:]


def _least_flops(run: RunSpec, sizes: RunSizes) -> float:
    """Return a lower bound of the run's floating-point operations, in matrix products.

    Experts are left out, because only some experts process a token.
    """
    target, hints = run.target, run.draft.shard_hints(run.target)
    outside = {target.embedding_name, target.head_name}
    per_token = 0.0
    if run.config.data.features is None:
        per_token += 2 * sum(
            prod(stored.shape)
            for name, stored in stored_tensors(target.folder).items()
            if name not in outside and ".experts." not in name and len(stored.shape) == 2
        )
    per_token += 6 * sum(
        prod(shape)
        for name, shape in sizes.weights.items()
        if len(shape) == 2 and not hints.is_vocabulary(name)
    )
    return per_token * run.dataset.total_tokens * run.schedule.epochs


def _product_flops_per_s(run: RunSpec) -> float:
    import torch

    dtype = getattr(torch, run.config.train.dtype)
    width, matrix, seconds = 128, torch.empty(0), 0.0
    while width < _WIDEST and seconds < _PRODUCT_S:
        width *= 2
        matrix = torch.randn(width, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        _product_s(matrix, 1)  # the first one loads kernels
        seconds = _product_s(matrix, 1)
    number = max(1, int(_MEASURED_S / seconds))
    return 2 * width**3 * number / _product_s(matrix, number)


def _product_s(matrix: torch.Tensor, number: int) -> float:
    """Return the seconds that ``number`` products of ``matrix`` with itself take.

    They include the wait until the device has finished.
    """
    start = time.perf_counter()
    product = matrix
    for _ in range(number):
        product = matrix @ matrix
    product[-1, -1].item()
    return time.perf_counter() - start


def _hours(seconds: float) -> float:
    return float(f"{seconds / 3600:.2g}")
