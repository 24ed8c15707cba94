"""Whole runs on the rig: ``spec-trainer train backend.name=ascend`` follows the curve of the cpu backend.

Runs of a draft share a worker, so that its curve on the cpu is made once.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import make_target  # noqa: F401 (a fixture)
from ..integration import launching
from ..integration.launching import Lab
from ..integration.run_directory import losses

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
TWO_AND_TWO = {**Lab.one_and_two, "engine__replicas": 2}
TOPOLOGIES = {
    "one card": ("eagle3", {"placement__kind": "inline"}),
    "one card shared, in its memory": (
        "eagle3",
        {"placement__kind": "colocated", "backend__ipc": "required"},
    ),
    "one card shared, through the host": (
        "dflash",
        {"placement__kind": "colocated", "backend__ipc": "never"},
    ),
}
"""Each with the draft that trains there: none depends on the other."""
ASCEND = {"backend__name": "ascend"}
EACH_TOPOLOGY = [
    pytest.param(*case, marks=pytest.mark.xdist_group(case[0]), id=name) for name, case in TOPOLOGIES.items()
]
EACH_VICTIM = [
    pytest.param(draft, victim, marks=pytest.mark.xdist_group(draft))
    for draft, victim in (("eagle3", "trainer-1"), ("dflash", "engine-0"))
]


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
        lab.train_here(output, **DRAFTS[draft])
        return losses(output)

    return curve


@pytest.mark.parametrize(("draft", "topology"), EACH_TOPOLOGY)
def test_the_loss_curve_is_the_cpu_backends(lab, cpu_curve, tmp_path, draft, topology):
    assert_curve(lab, cpu_curve, draft, tmp_path / "run", topology)


def assert_curve(lab, cpu_curve, draft, output, topology):
    lab.train(output, **ASCEND, **DRAFTS[draft], **topology)
    assert len(losses(output)) == STEPS
    assert losses(output) == pytest.approx(cpu_curve(draft), rel=1e-4)


@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"distributed_optimizer": True}, id="data", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel": 2, "sequence_parallel": True}, id="tensor"),
    ],
)
def test_two_ranks_of_megatron_follow_a_curve_of_the_cpu(lab, tmp_path, way):
    """Data parallel with the distributed optimizer, and a divided draft, over HCCL."""
    draft = {**DRAFTS["eagle3"], "draft__vocab_size": 60}
    megatron = {"strategy__name": "megatron", **{f"strategy__{key}": value for key, value in way.items()}}
    lab.train_here(tmp_path / "whole", **draft)
    lab.train(tmp_path / "divided", **ASCEND, **draft, **Lab.one_and_two, **megatron)
    assert losses(tmp_path / "divided") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.xdist_group("eagle3")
def test_the_curve_is_the_same_over_hccl_where_ranks_are_connected_before_engines(
    lab, cpu_curve, monkeypatch
):
    """Two ranks and two engines on four cards. HCCL refuses to connect two groups of a process at once, and torch
    connects its own in the first collective."""
    monkeypatch.setenv("FAKE_CANN_TRACE", "1")
    output = lab.folder / "traced"
    assert_curve(lab, cpu_curve, "eagle3", output, TWO_AND_TWO)
    for rank in range(2):
        log = (output / f"logs/trainer-{rank}.log").read_text()
        calls = re.findall(r"HcclCommInitRootInfo|HcclAllReduce", log)
        assert calls[:2] == ["HcclCommInitRootInfo", "HcclAllReduce"]
        assert calls.count("HcclCommInitRootInfo") == 1 + TWO_AND_TWO["engine__replicas"]


@pytest.mark.parametrize(("draft", "victim"), EACH_VICTIM)
def test_a_killed_run_resumes_and_its_checkpoint_goes_on_on_the_cpu(lab, cpu_curve, draft, victim):
    """Another engine takes the place of one that was killed; samples that had not arrived are sent again."""
    output = lab.folder / f"killed-{victim}"
    two_ranks = {**DRAFTS[draft], **Lab.one_and_two}
    run = lab.start(output, **ASCEND, **two_ranks)
    run.save_on()
    run.member(victim).kill()
    replaced = victim.startswith("engine")
    assert run.wait(120 if replaced else 60) == (0 if replaced else 1), run.story()
    assert replaced or victim in run.last_line()
    assert not run.processes()
    if not replaced:
        resumed = lab.start(output, **ASCEND, **two_ranks, train__steps=6)
        assert resumed.wait(120) == 0, resumed.story()
        assert resumed.resumed_from() >= 3
    lab.train_here(output, **DRAFTS[draft])
    assert losses(output) == pytest.approx(cpu_curve(draft), rel=1e-4)


@pytest.mark.xdist_group("dflash")
def test_bfloat16_follows_the_cpu_as_closely_as_it_can(lab):
    """Rounded products add up to other last bits where the kernels are others."""
    curves = []
    for backend, train in (("cpu", lab.train_here), ("ascend", lab.train)):
        output = lab.folder / f"bfloat16-{backend}"
        train(output, backend__name=backend, train__dtype="bfloat16", **DRAFTS["eagle3"])
        curves.append(losses(output))
    assert curves[1] == pytest.approx(curves[0], rel=1e-2)


@pytest.mark.xdist_group("megatron")
def test_the_self_test_tells_what_it_ran_on_and_passes():
    words = [str(Path(sys.executable).with_name("spec-trainer")), "check", "--backend", "ascend", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["versions"].keys() >= {"torch", "torch-npu", "cann"}
    assert report["capabilities"]["num_devices"] == 4
    details = {step["step"]: step["detail"] for step in report["steps"]}
    assert details["device"] == "npu:0, Ascend910B3"
    used, _ = details["kernels"].split("; plain torch: ")
    assert {"norm_rotate", "rotate", "swiglu_mlp"} <= set(used.split(", "))
    assert details["2-rank collectives"] == "sum and broadcast are right"
    assert details["transport, disaggregated"] == "one sample from device 1 to device 0, equal bit for bit"
