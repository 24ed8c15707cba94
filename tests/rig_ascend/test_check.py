"""``spec-trainer check --backend ascend --thorough`` names what is wrong with an installation.

``test_without_cann.py`` has two more: CANN that is not sourced, and an empty list of cards.
"""

import multiprocessing
import os
import re
import shutil
from functools import partial
from pathlib import Path

import broken_installations
import fake_cann
import pytest
import torch
import torch_npu  # noqa: F401 (torch.npu)
from broken_installations import CARD_LOST

from spec_trainer.cli.commands import check, own_process
from spec_trainer.cli.commands.check import check_backend
from spec_trainer.cli.commands.small_runs import small_runs

from ..distributions import write_distribution

PRELOADED = [
    "broken_installations",
    "transformers.models.qwen3.modeling_qwen3",
    "spec_trainer.cli.commands.train",
]

pytestmark = pytest.mark.xdist_group("check")


def broken_steps(monkeypatch, **steps):
    """step -> detail of the steps that fail, of these alone."""
    monkeypatch.setattr(check, "_tests", dict)
    monkeypatch.setattr(check, "small_runs", lambda: steps)
    report = check_backend("ascend", thorough=True)
    assert not report["ok"]
    return {step["step"]: step["detail"] for step in report["steps"] if not step["ok"]}


def one_card_of_two(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_CANN_DEVICES", "1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")


def no_driver(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    fake_cann.fail("aclrtGetDeviceCount", CARD_LOST)


def another_torch(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(write_distribution(tmp_path, "torch-npu", "", version="2.9.0"))


def torch_for_cuda(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    monkeypatch.setattr(torch.__spec__, "submodule_search_locations", [str(tmp_path)])


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (no_driver, "no NPU answers: check the driver with 'npu-smi info'"),
        (one_card_of_two, "ASCEND_RT_VISIBLE_DEVICES='0,1': 0 NPUs of this list answer"),
        (another_torch, "torch-npu 2.9.0 does not go with torch 2.13.0"),
        (torch_for_cuda, "is built for CUDA, torch-npu 2.13.0 needs a build without"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_probe_finds_starts_no_process(monkeypatch, tmp_path, breaks, words):
    breaks(monkeypatch, tmp_path)
    broken = broken_steps(monkeypatch, unreached=print)
    assert broken.keys() == {"probe"}
    assert words in broken["probe"]


def test_another_cann_than_torch_npu_asks_for(monkeypatch, tmp_path):
    """Its libraries lack what torch-npu wants of them."""
    built = next(Path(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0]).glob("libge_runner.so"))
    shutil.copy(built, tmp_path / "libascendcl.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=os.pathsep)
    detail = broken_steps(monkeypatch, device=check._device)["device"]
    assert "torch_npu does not load" in detail
    assert "undefined symbol" in detail
    assert "cann 8.3.RC1; source /usr/local/Ascend" in detail


@pytest.fixture
def forked(monkeypatch):
    """Fork processes from a server that has imported torch_npu, and wait little for them."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(own_process, "get_context", lambda _: server)
    monkeypatch.setattr(own_process, "_END_S", 0.1)


@pytest.mark.parametrize(
    ("fault", "step", "words"),
    [
        ("taken_card", "device", "out of memory"),
        ("taken_port", "2-rank collectives", "set HCCL_IF_BASE_PORT to the first of 16 free ports"),
        ("second_card_lost", "2-rank collectives", f"the second process: RuntimeError: .*{CARD_LOST}"),
        ("hanging_hccl", "2-rank collectives", "not finished after 3 s"),
        ("crash", "device", "was killed by signal 6"),
        ("no_sharing", "transport, colocated", "cannot share its memory: aclrtIpcMemGetExportKey failed"),
        ("missing_operator", "train eagle3", "npu_absent"),
        ("wrong_operator", "train eagle3", "float32: loss differs by .*, but 1e-02 is the limit"),
    ],
)
def test_a_step_says_what_is_wrong(monkeypatch, forked, fault, step, words):
    tests = {**check._tests(), **small_runs()}
    if fault == "hanging_hccl":
        monkeypatch.setattr(check, "_STEP_S", 3.0)
    planted = partial(broken_installations.after, getattr(broken_installations, fault), tests[step])
    assert re.search(words, broken_steps(monkeypatch, **{step: planted})[step])


def test_a_draft_trains_as_on_the_cpu(monkeypatch, forked):
    train = small_runs()["train dspark"]
    monkeypatch.setattr(check, "_tests", dict)
    monkeypatch.setattr(check, "small_runs", lambda: {"train": train})
    report = check_backend("ascend", thorough=True)
    assert report["ok"], report
