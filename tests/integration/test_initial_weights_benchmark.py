"""``initial_weights`` runs at toy size and prints one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).parents[2] / "benchmarks" / "initial_weights.py"


def test_initial_weights_tells_schemes_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["--toy", "--seed", "0", "--gains", "0.5", "0.03", "--gains", "1", "1"]
    command = [sys.executable, "-W", "error", str(COMMAND), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = document["rows"]
    assert len({row["held_out_loss"] for row in rows}) == 2
    assert all(1 <= row["acceptance_length"] <= 5 and row["standard_error"] >= 0 for row in rows)
    assert [row["draws"] for row in document["summary"]] == [1, 1]
    assert {"torch", "spec-core"} <= document["versions"].keys()
