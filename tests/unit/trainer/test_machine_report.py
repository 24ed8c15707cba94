"""``spec-trainer check`` without a backend: what a maintainer would ask."""

from __future__ import annotations

import json
from importlib import metadata

from spec_backend_cpu.backend import CpuBackend
from spec_core.records import Capabilities
from spec_trainer.cli import run
from spec_trainer.machine_report import describe_machine


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
    assert report["variables"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert "secret" not in json.dumps(report)


def test_the_command_adds_a_test_of_a_backend(monkeypatch, capsys):
    monkeypatch.setattr(
        "spec_trainer.backend_check.check_backend", lambda name: {"backend": name, "ok": True}
    )
    monkeypatch.setattr("spec_trainer.machine_report.describe_machine", lambda: {"cores": 2})
    assert run(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cores": 2, "backend": "cpu", "ok": True}
