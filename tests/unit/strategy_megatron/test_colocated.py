"""Whole runs beside an engine: two ranks that divide a draft train what two ranks of ``fsdp`` train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

strategy = pytest.importorskip("spec_strategy_megatron.strategy").MegatronStrategy
if not strategy.probe().ok:
    pytest.skip(strategy.probe().reason, allow_module_level=True)
if "SPEC_TEST_ALL_OF_MEGATRON" not in os.environ:
    pytest.skip("seconds for each process: make test-megatron", allow_module_level=True)

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "colocated.py"
LIMIT_S = 250.0
"""Minutes more than a run takes: a loaded machine is no failure."""


def losses(*arguments: str) -> list[float]:
    """Return the first and the last loss of the benchmark's run, on two devices that an engine and a rank share."""
    command = [sys.executable, str(BENCHMARK), "--toy", "--devices", "2", "--phases", "both", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["both"]["losses"]


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_divided_draft_learns_the_same_beside_engines():
    """Both ranks get every sample, in two micro-batches as large as a rank's of ``fsdp``."""
    divided = ["--draft-parallel", "2", "--passes", "2", "--", "strategy.name=megatron"]
    expected = losses()
    assert losses(*divided) == pytest.approx(expected, rel=1e-5)
    assert losses(*divided, "strategy.sequence_parallel=true") == pytest.approx(expected, rel=1e-5)
