"""``spec-trainer check`` without a backend: what a maintainer would ask."""

import json
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core.records import Capabilities
from spec_trainer.cli.app import run
from spec_trainer.cli.commands.machine_report import describe_machine


def test_it_says_what_is_installed_runs_fits_and_is_missing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    capabilities = Capabilities(device_bytes=80 << 30, process_bytes=1 << 30)
    monkeypatch.setattr(CpuBackend, "capabilities", classmethod(lambda cls: capabilities))
    report = describe_machine()
    assert report["packages"]["torch"] == metadata.version("torch")
    assert report["packages"].keys() >= {"spec-core", "spec-trainer", "pydantic", "safetensors"}
    assert not set(report["not_installed"]) & report["packages"].keys()
    assert report["plugins"]["engine hf"] == "ok"
    assert report["fits"]["cpu"]["largest_target"].startswith(
        "about 34 billion parameters in bfloat16 on a device"
    )
    assert report["fits"]["cpu"]["versions"]["torch"] == metadata.version("torch")
    assert report["variables"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert "secret" not in json.dumps(report)


def test_it_says_what_fits_in_the_memory_of_a_host_without_devices(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=20 * 10**9, available=10**9))
    offer = describe_machine()["fits"]["cpu"]
    assert offer["largest_target"].startswith(
        "about 4.0 billion parameters in bfloat16 in half of this host's"
    )


@pytest.mark.parametrize(
    ("offers", "tested"),
    [({"cpu": None}, "cpu"), ({"cpu": None, "cuda": 80 << 30}, "cuda"), ({}, "cpu")],
    ids=["cpu", "a GPU", "nothing"],
)
def test_the_command_adds_a_test_of_the_backend_with_devices(monkeypatch, capsys, offers, tested):
    machine = {"cores": 2, "fits": {name: {"device_bytes": size} for name, size in offers.items()}}
    monkeypatch.setattr(
        "spec_trainer.cli.commands.check.check_backend", lambda name, thorough: {"backend": name, "ok": True}
    )
    monkeypatch.setattr("spec_trainer.cli.commands.machine_report.describe_machine", lambda: machine)
    assert run(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**machine, "backend": tested, "ok": True}
