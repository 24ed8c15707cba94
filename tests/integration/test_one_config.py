"""One configuration file for all hardware: only ``--backend`` differs."""

import json
from pathlib import Path

import pytest

from spec_backend_ascend.backend import AscendBackend
from spec_backend_cuda.backend import CudaBackend
from spec_core.records import Availability, Capabilities

EXAMPLE = Path(__file__).parents[2] / "examples/tiny-processes.yaml"
OF_HARDWARE = {"processes", "device_bytes", "device_memory", "rank_memory", "resources", "expected_time"}
"""Keys of a plan that may name devices."""


@pytest.fixture
def all_hardware(monkeypatch):
    """A host with four cards of each vendor, as far as anybody asks before a process is started."""
    offered = Capabilities(
        device_ipc=True, memory_limit=True, dtypes=frozenset({"float32", "bfloat16"}), num_devices=4
    )
    for plugin in (CudaBackend, AscendBackend):
        monkeypatch.setattr(plugin, "probe", classmethod(lambda cls: Availability(ok=True)))
        monkeypatch.setattr(plugin, "capabilities", classmethod(lambda cls: offered))


@pytest.mark.usefixtures("all_hardware")
@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_the_same_file_gives_the_same_run_on_every_hardware(
    command_line, peaked_target, rows_file, tmp_path, placement
):
    words = [
        "--config",
        EXAMPLE,
        "--target",
        peaked_target,
        "--data",
        rows_file,
        f"data.eval_path={rows_file}",
    ]
    plans = {}
    for backend in ("cpu", "cuda", "ascend"):
        flags = ["--backend", backend, "--placement", placement, "--output", tmp_path / "run", "--json"]
        outcome = command_line("plan", *words, *flags)
        assert outcome.code == 0, outcome.err
        plans[backend] = json.loads(outcome.out)
    for plan in plans.values():
        assert len(plan["processes"]) == 4
    common = [
        {key: value for key, value in plan.items() if key not in OF_HARDWARE} for plan in plans.values()
    ]
    assert common[0]["identity"]
    assert common[0] == common[1] == common[2]
