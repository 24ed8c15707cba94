"""Estimate a run's hours from the time of its steps so far, or give a lower bound from its FLOPs."""

from __future__ import annotations

import time
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_core import Backend
from spec_core.wording import counted
from spec_kit.targets import stored_tensors
from spec_trainer.run.metrics import read_metrics

if TYPE_CHECKING:
    import torch

    from spec_trainer.run.spec import RunSpec

_LAST_STEPS = 20
_FEWEST_STEPS = 3
_WIDEST = 8192
_PRODUCT_S = 0.003
"""If one matrix product takes more than these seconds, no wider product is measured."""
_MEASURED_S = 0.05
_MEASUREMENTS = 5
_MOST_SAMPLES = 10_000
"""Number of samples whose cost is summed; the cost of more samples is estimated from about as many of them."""
_ACCELERATOR_FLOPS = 1e15
"""FLOP/s in bfloat16 of the fastest accelerator that was tested: the peak of an H100 or H200 without sparsity."""


def expected_time(run: RunSpec) -> dict[str, Any]:
    """Estimate the hours that a run takes, or give a lower bound; say what the number is based on.

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
    of_target, of_draft = _target_flops(run), _draft_flops(run)
    flops = of_target + of_draft
    measured = run.backend.device_type == Backend.device_type  # the default: a CPU
    rate = _product_flops_per_s(run) if measured else _ACCELERATOR_FLOPS
    speed = "which a matrix product has reached just now" if measured else "the peak of an H200"
    devices = len({device for member in run.members() for device in member.devices}) or 1
    return {
        "hours_at_least": _hours(flops / rate / devices),
        "rests_on": f"{flops:.1e} FLOPs ({of_target:.1e} of the target's layers, and {of_draft:.1e} of the draft's "
        f"steps) at {rate:.1e} FLOP/s on each of {counted(devices, 'device')}, {speed}; waiting and what is no "
        "matrix product come on top, and the progress of the run shows the real pace",
    }


def _recorded(run: RunSpec) -> list[dict[str, Any]]:
    if run.directory.begun_as() != run.identity or not run.directory.metrics.exists():
        return []
    rows = read_metrics(run.directory.metrics)
    return [row for row in rows if "time_step_s" in row and "time_data_s" in row][-_LAST_STEPS:]


def _target_flops(run: RunSpec) -> float:
    """Return a lower bound of the target's FLOPs for the features of the run: 2 for each weight and token.

    Experts are left out, because only some experts process a token.
    """
    if run.config.data.features is not None:
        return 0.0
    outside = {run.target.embedding_name, run.target.head_name}
    weights = sum(
        prod(stored.shape)
        for name, stored in stored_tensors(run.target.folder).items()
        if name not in outside and ".experts." not in name and len(stored.shape) == 2
    )
    return 2.0 * weights * run.dataset.total_tokens * run.schedule.epochs


def _draft_flops(run: RunSpec) -> float:
    """Return the FLOPs of the draft's training, by the draft's own estimate for samples over the whole data."""
    train = run.dataset.train
    some = train[:: max(1, len(train) // _MOST_SAMPLES)]
    cost = sum(
        run.draft_cost.sample_flops(len(sample), int(np.count_nonzero(sample.loss_mask))) for sample in some
    )
    return cost * len(train) / max(1, len(some)) * run.schedule.epochs


def _product_flops_per_s(run: RunSpec) -> float:
    import torch

    dtype = getattr(torch, run.config.train.dtype)
    width = 128
    matrix = torch.empty(0)
    seconds = 0.0
    while width < _WIDEST and seconds < _PRODUCT_S:
        width *= 2
        matrix = torch.randn(width, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        _product_s(matrix, 1)  # the first one loads kernels
        seconds = _product_s(matrix, 1)
    number = max(1, int(_MEASURED_S / seconds))
    fastest_s = min(_product_s(matrix, number) for _ in range(_MEASUREMENTS))  # others use the cores, too
    return 2 * width**3 * number / fastest_s


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
