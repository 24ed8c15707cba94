"""Whole runs on the rig: ``spec-trainer train backend.name=ascend`` follows the curve of the cpu backend."""

from __future__ import annotations

import functools
import os

import pytest

from ..conftest import make_target  # noqa: F401 (a fixture)
from ..integration import launching
from ..integration.launching import Lab, losses

STEPS = 8
DRAFTS = {
    "eagle3": {"draft__name": "eagle3", "draft__num_steps": 3},
    "dflash": {
        "draft__name": "dflash",
        "draft__block_size": 4,
        "draft__num_layers": 2,
        "draft__mask_token_id": 96,
    },
}
TOPOLOGIES = {
    "one card": {"placement__kind": "inline"},
    "two ranks, engine on a third card, over HCCL": {"placement__kind": "disaggregated", "train__ranks": 2},
    "one card shared, in its memory": {"placement__kind": "colocated", "backend__ipc": "required"},
    "one card shared, through the host": {"placement__kind": "colocated", "backend__ipc": "never"},
}
ASCEND = {"backend__name": "ascend"}


@pytest.fixture(scope="module")
def lab(make_target, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("lab")
    keys = {
        "target": make_target("llama", initializer_range=0.6),
        "data.path": launching.write_rows(folder / "rows.jsonl"),
        "train.steps": STEPS,
        "train.schedule": "constant",
        "train.lr": 3e-3,
        "train.warmup_steps": 2,
        "train.global_batch_tokens": 96,
        "train.save_every": 3,
    }
    with Lab(folder, keys, os.environ["PYTHONPATH"]) as lab:
        yield lab


@pytest.fixture(scope="module")
def cpu_curve(lab):
    @functools.cache
    def curve(draft):
        output = lab.folder / f"cpu-{draft}"
        lab.train(output, **DRAFTS[draft])
        return losses(output)

    return curve


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_loss_curve_is_the_cpu_backends(lab, cpu_curve, draft, topology):
    output = lab.folder / f"{draft}-{list(TOPOLOGIES).index(topology)}"
    lab.train(output, **ASCEND, **DRAFTS[draft], **TOPOLOGIES[topology])
    assert len(losses(output)) == STEPS
    assert losses(output) == pytest.approx(cpu_curve(draft), rel=1e-4)


@pytest.mark.parametrize("victim", ["engine-0", "trainer-1"])
def test_a_killed_run_resumes_and_its_checkpoint_goes_on_on_the_cpu(lab, cpu_curve, victim):
    output = lab.folder / f"killed-{victim}"
    two = {**DRAFTS["eagle3"], **TOPOLOGIES["two ranks, engine on a third card, over HCCL"]}
    run = lab.start(output, **ASCEND, **two)
    run.save_on()
    run.member(victim).kill()
    assert run.wait(60) == 1
    assert victim in run.last_line()
    assert not run.processes()
    resumed = lab.start(output, **ASCEND, **two, train__steps=6)
    assert resumed.wait(120) == 0, resumed.story()
    assert resumed.resumed_from() >= 3
    lab.train(output, **DRAFTS["eagle3"])
    assert losses(output) == pytest.approx(cpu_curve("eagle3"), rel=1e-4)


def test_bfloat16_follows_the_cpu_as_closely_as_it_can(lab):
    """Rounded products add up to other last bits where the kernels are others."""
    curves = []
    for backend in ("cpu", "ascend"):
        output = lab.folder / f"bfloat16-{backend}"
        lab.train(output, backend__name=backend, train__dtype="bfloat16", **DRAFTS["eagle3"])
        curves.append(losses(output))
    assert curves[1] == pytest.approx(curves[0], rel=1e-2)
