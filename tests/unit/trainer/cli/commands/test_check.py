"""``spec-trainer check``: each step has its own verdict; one failure hides no other."""

import json
import logging
import multiprocessing
from operator import methodcaller

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import Backend, plugins
from spec_core.errors import ConfigError, PluginError
from spec_core.records import Availability
from spec_trainer.cli.commands import check, own_process
from spec_trainer.cli.commands.check import check_backend
from spec_trainer.cli.commands.small_runs import small_runs

from .....distributions import write_distribution


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    """Fork the other processes from a server that has imported torch, in place of starting Python for each."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "spec_backend_cpu.backend"])
    monkeypatch.setattr(own_process, "get_context", lambda _: server)


def steps(report) -> dict[str, dict]:
    return {step["step"]: step for step in report["steps"]}


def test_cpu_passes():
    report = check_backend("cpu")
    assert report["ok"]
    assert steps(report).keys() >= {
        "probe", "device", "memory limit", "attention kernel", "kernels", "2-rank collectives",
        "transport round trip", "transport, colocated", "transport, disaggregated",
    }  # fmt: skip
    assert "torch" in report["versions"]
    used, plain = steps(report)["kernels"]["detail"].split("; plain torch: ")
    assert "block_attention" in used.split(", ")
    assert "swiglu_mlp" in plain.split(", ")
    assert report["capabilities"]["num_devices"] == 1
    assert report["package"].startswith("spec-backend-cpu ")
    assert json.loads(json.dumps(report)) == report


def test_a_strangers_broken_draft_is_named_and_passed_over(tmp_path, monkeypatch):
    points = "[spec_core.drafts]\nodd = odd_draft:Odd\nno-import = no_module:Draft\n"
    site = write_distribution(tmp_path / "site", "stranger", points)
    (site / "odd_draft.py").write_text(
        "from spec_draft_eagle3.draft import Eagle3Draft\n\nclass Odd(Eagle3Draft):\n    name = 'odd'\n\n"
        "    def kernels(self):\n        raise AttributeError\n"
    )
    monkeypatch.syspath_prepend(site)
    found = check._kernels(CpuBackend(CpuBackend.Config(name="cpu")))
    assert "swiglu_mlp" in found
    assert "draft 'odd' is passed over: " in found
    assert "draft 'no-import' of stranger" in found
    assert "train no-import" not in small_runs()
    with pytest.raises(
        PluginError, match=r"draft 'odd' does not train on backend 'cpu' either: AttributeError"
    ):
        small_runs()["train odd"](CpuBackend(CpuBackend.Config(name="cpu")))


def test_a_failing_step_is_reported_and_the_others_still_run(monkeypatch):
    class Broken(CpuBackend):
        def transport(self, placement):
            if placement == "inline":
                raise RuntimeError("the link is down\nand more")
            raise ConfigError("there is no such link")

    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda kind, name: Broken if kind is Backend else load(kind, name))
    report = check_backend("cpu")
    assert not report["ok"]
    verdicts = steps(report)
    assert "the link is down" in verdicts["transport round trip"]["detail"]
    assert [step for step, verdict in verdicts.items() if not verdict["ok"]] == ["transport round trip"]
    assert verdicts["transport, colocated"]["detail"] == "not run: there is no such link"


def test_a_thorough_check_runs_each_step_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(check, "_tests", lambda: {"limit": methodcaller("limit_memory", 0.5)})
    monkeypatch.setattr(check, "small_runs", lambda: {"right": check._device})
    verdicts = steps(check_backend("cpu", thorough=True))
    assert "backend 'cpu' cannot limit device memory" in verdicts["limit"]["detail"]
    assert verdicts["right"]["detail"].startswith("cpu, ")
    assert [name for name, step in verdicts.items() if not step["ok"]] == ["limit"]


def test_a_thorough_check_trains_every_draft_and_compares_it_with_the_cpus():
    assert small_runs().keys() >= {"train dspark", "train eagle3", "train eagle3, disaggregated"}
    detail = small_runs()["train eagle3"](CpuBackend(CpuBackend.Config(name="cpu")))
    assert detail.startswith("float32: loss differs by 0e+00, grad_norm differs by 0e+00; ")
    assert "; bfloat16: loss differs" in detail
    assert logging.getLogger("spec_trainer").isEnabledFor(logging.WARNING), "as before"


def test_an_unavailable_backend_is_not_touched(monkeypatch):
    class Absent(CpuBackend):
        @classmethod
        def probe(cls):
            return Availability(ok=False, reason="the SDK is missing")

        def __init__(self, config):
            raise AssertionError("built")

    monkeypatch.setattr("spec_core.plugins.load", lambda interface, name: Absent)
    report = check_backend("absent")
    assert not report["ok"]
    assert steps(report) == {
        "probe": {"step": "probe", "ok": False, "seconds": 0.0, "detail": "the SDK is missing"}
    }
