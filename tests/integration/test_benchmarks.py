"""``trainer_step`` runs at toy size and prints one JSON document."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / "benchmarks" / "trainer_step.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(COMMAND), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def document():
    done = run("--toy", "--peak-tflops", "0.1", "--parts", "dense")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_trainer_step_trains_and_reports_time_memory_and_utilisation(document):
    row = document["step"]
    assert row["losses"][0] > row["losses"][-1] > 0
    for measured in ("wall_ms", "cpu_ms", "peak_mib", "step_mib", "tokens_per_s", "gflop", "mfu"):
        assert row[measured] > 0, measured


@pytest.mark.slow
def test_trainer_step_agrees_with_the_dense_implementation(document):
    dense = document["dense"]
    assert dense["loss_difference"] < 1e-4
    assert dense["cpu_time_ratio"] > 0
    assert dense["memory_ratio"] > 0
    assert dense["row"]["losses"] != document["step"]["losses"]
    assert [check["check"] for check in document["checks"]] == ["loss difference from dense"]


def test_trainer_step_scales_along_three_axes(monkeypatch, capsys):
    """Rows are made up: everything costs as much as there is to do."""
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    import trainer_step

    def row(case):
        work = case.tokens * case.sequences * case.num_steps
        costs = dict.fromkeys(("cpu_ms", "wall_ms", "peak_mib", "step_mib"), float(work))
        return [{"tokens": case.tokens, "sequences": case.sequences, "num_steps": case.num_steps, **costs}]

    monkeypatch.setattr(trainer_step, "_run", row)
    monkeypatch.setattr(sys, "argv", [COMMAND.name, "--toy", "--parts", "tokens", "sequences", "num_steps"])
    assert trainer_step.main() == 0
    scaling = json.loads(capsys.readouterr().out)["scaling"]
    assert scaling.keys() == {"tokens", "sequences", "num_steps"}
    for axis, part in scaling.items():
        assert [row[axis] for row in part["rows"]] == part["sizes"]
        assert part["exponents"] == {cost: pytest.approx(1) for cost in part["exponents"]}
        assert part["exponents"].keys() == {"cpu_ms", "wall_ms", "peak_mib", "step_mib"}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_trainer_step_measures_blocks_with_a_profile(draft):
    done = run(
        "--toy", "--draft", draft, "--parts", "--unsupervised", "0.3", "--profile", "--peak-tflops", "0.1"
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["step"]
    assert row["losses"][0] > row["losses"][-1] > 0
    assert row["samples_per_s"] > 0
    assert row["mfu"] > 0
    times = [ms for ms, _, _ in row["profile"]["kernels"]]
    assert times == sorted(times, reverse=True)
    assert sum(times) <= row["profile"]["total_ms"] * 1.01


@pytest.mark.slow
def test_trainer_step_measures_every_other_draft():
    done = run("--toy", "--drafts", "--peak-tflops", "0.1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["drafts"]
    assert len(rows) == 6
    for row in rows.values():
        assert row["losses"][0] > row["losses"][-1] > 0
        assert row["mfu"] > 0


@pytest.mark.slow
def test_trainer_step_lengthens_a_document():
    done = run("--toy", "--lengths", "16", "32", "--unsupervised", "0.3")
    assert done.returncode == 0, done.stderr
    series = json.loads(done.stdout)["lengths"]
    assert [[row["tokens"] for row in part["rows"]] for part in series.values()] == 12 * [[16, 32]]
    assert all("wall_ms" in part["exponents"] for part in series.values())
    # The step is the same with the key and without.
    rows = [part["rows"][0]["losses"] for part in series.values()]
    for plain, again in zip(rows[::2], rows[1::2], strict=True):
        assert again == pytest.approx(plain, rel=1e-4)


def test_trainer_step_refuses_the_dense_part_in_another_dtype():
    done = run("--toy", "--dtype", "bfloat16")
    assert done.returncode == 2
    assert "float32" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_small_shapes_fail_where_the_host_leads(monkeypatch, capsys):
    """Rows are made up: every step but one takes as long as its kernels."""
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    import trainer_step

    def row(case):
        slow = (case.draft, case.sequences) == ("dspark", 40)
        return [{"wall_over_kernels": 1.5 if slow else 1.0}]

    monkeypatch.setattr(trainer_step, "_run", row)
    monkeypatch.setattr(sys, "argv", [COMMAND.name, "--shapes", "small"])
    assert trainer_step.main() == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["check"] for check in checks if not check["ok"]] == [
        "dspark, H 768, blocks of 7, 384 x 40: wall time over kernel time"
    ]
    assert len(checks) > 10
