"""``colocated``, ``disaggregated`` and ``transport`` run at toy size, and what they compute."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spec_core.errors import SpecError

pytestmark = pytest.mark.xdist_group("run_benchmarks")  # one fixture for all

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of the random target, written by the first benchmark."""
    return str(tmp_path_factory.mktemp("target") / "toy")


@pytest.fixture(scope="module")
def colocated(target):
    done = run("colocated.py", "--toy", "--target", target)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_efficiency_is_the_runs_speed_over_what_taking_turns_would_give(colocated):
    alone = [colocated[phase]["samples_per_s"] for phase in ("engine", "trainer")]
    ideal = alone[0] * alone[1] / sum(alone)
    assert colocated["ideal_samples_per_s"] == pytest.approx(ideal)
    assert colocated["efficiency"] == pytest.approx(colocated["both"]["samples_per_s"] / ideal)
    assert colocated["efficiency"] > 0


@pytest.mark.slow
def test_the_run_is_timed_between_its_warm_up_and_its_cool_down(colocated):
    settings, both = colocated["settings"], colocated["both"]
    assert both["steps"] == settings["steps"] - settings["warm_up"] - settings["cool_down"]
    assert both["samples_per_s"] == pytest.approx(
        both["steps"] * settings["samples_per_step"] / both["elapsed_s"]
    )
    assert 0 <= both["data_wait_share"] <= 1


@pytest.mark.slow
def test_disaggregated_counts_all_devices_and_profiles_a_step_of_the_warm_up(target):
    done = run(
        "disaggregated.py", "--toy", "--target", target, "--setting", "dflash", "--phases", "both",
        "--profile-step", "1", "--", "engine.batch_tokens=96", "train.lr=1e-3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["settings"]["devices"] == 2
    assert document["settings"]["samples_per_step"] == 4
    per_device = document["per_device"]["samples_per_s"]
    assert per_device == pytest.approx(document["both"]["samples_per_s"] / 2)
    assert document["both"]["config"]["engine"]["batch_tokens"] == 96
    assert document["both"]["config"]["train"]["accumulation"] == 4
    assert document["both"]["profile"]["calls"] > 0
    assert "efficiency" not in document


def test_the_real_controller_trains_a_simulated_run_to_its_end_with_few_messages():
    done = run("scaling.py", "--toy")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["start"]) == 2
    for row in document["work"]:
        assert 1 < row["messages_per_sample"] < 4
        assert row["cpu_us_per_sample"] > 0
        assert 0 <= row["wait_share"] < 1


@pytest.mark.usefixtures("on_path")
def test_a_command_that_fails_ends_the_benchmark_with_what_it_and_its_processes_said(tmp_path, capsys):
    from commands import output_of

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text("the member's reason\n")
    code = "import sys; print('half a document'); print('the reason', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SystemExit, match="ended with exit code 3"):
        output_of([sys.executable, "-c", code], tmp_path / "log", 60, tmp_path / "logs")
    out, err = capsys.readouterr()
    assert (out, err.count("the member's reason"), err.count("the reason")) == ("", 1, 1)


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "draft.num_steps=3"], "sets draft.num_steps itself"),
        (["--steps", "5", "--warm-up", "3"], "--warm-up 3"),
        (["--profile-step", "5"], "--profile-step 5"),
        (["--setting", "dflash", "--samples-per-step", "6"], "does not divide into 4 passes"),
        (["--devices", "2", "--target-parallel", "2"], "add --phases both"),
    ],
)
def test_what_would_make_the_phases_differ_is_refused(monkeypatch, capsys, arguments, said):
    from colocated import main

    monkeypatch.setattr(sys, "argv", ["colocated.py", "--toy", *arguments])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("on_path")
def test_steady_state_goes_by_the_clock_between_the_ends_of_steps():
    from real_run import steady_state

    stamps = [30.0, 31.0, 32.0, 34.0, 36.0, 90.0, 91.0]
    records = [
        {
            "time_s": stamp, "time_data_s": 0.2, "time_step_s": 0.5, "samples": 4, "tokens": 100,
            "loss": 7.0 - step, "memory_device_bytes": (step + 1) << 20,
        }
        for step, stamp in enumerate(stamps)
    ]  # fmt: skip
    found = steady_state(records, 1, 2)
    assert found["elapsed_s"] == 6
    assert found["samples_per_s"] == pytest.approx(16 / 6)
    assert found["tokens_per_s"] == pytest.approx(400 / 6)
    assert found["data_wait_share"] == pytest.approx(0.8 / 6)
    assert found["halves_samples_per_s"] == [pytest.approx(4), pytest.approx(2)]
    assert found["interval_ms"]["median"] == pytest.approx(1500)
    assert found["step_ms"] == pytest.approx(500)
    assert found["trainer_peak_mib"] == 5


@pytest.mark.usefixtures("on_path")
def test_every_setting_names_options_of_its_draft():
    from run_settings import GOALS, SETTINGS, beside_goals, case_fields
    from trainer_step import Case

    from spec_core import Draft, plugins

    for setting in SETTINGS:
        case = Case(**case_fields(setting, "qwen3-8b"))
        draft = plugins.load_available(Draft, case.draft)
        draft.Config(name=case.draft, **case.draft_options())
        assert bool(beside_goals(setting, {"efficiency": 1.0})) == (setting in GOALS)


@pytest.mark.usefixtures("on_path")
def test_a_trace_is_summed_by_name_over_the_devices_work_alone(tmp_path):
    from trace_table import trace_table

    def event(name, category, start, duration):
        return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration}

    file = tmp_path / "trace.json"
    events = [
        event("gemm", "kernel", 1000, 3000),
        event("norm", "kernel", 5000, 1000),
        event("gemm", "kernel", 7000, 2000),
        event("aten::mm", "cpu_op", 0, 90_000),
        {"ph": "f", "name": "arrow"},
    ]
    file.write_text(json.dumps({"traceEvents": events}))
    found = trace_table(file)
    assert found["kernels"] == [(5.0, 2, "gemm"), (1.0, 1, "norm")]
    assert (found["total_ms"], found["calls"], found["span_ms"]) == (6.0, 3, 8.0)


@pytest.mark.usefixtures("on_path")
def test_random_samples_are_supervised_at_their_end_and_few_tokens_are_most_of_them(tmp_path):
    import numpy as np
    from random_dataset import write_random_dataset

    file = write_random_dataset(tmp_path / "data.jsonl", 50, 100, 1000, 0.7)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 50
    assert all(row["loss_mask"] == 30 * [0] + 70 * [1] for row in rows)
    counts = np.bincount(np.array([row["input_ids"] for row in rows]).ravel(), minlength=1000)
    assert len(counts) == 1000
    assert 0.75 < np.sort(counts)[-200:].sum() / counts.sum() < 0.85  # H(200) / H(1000) = 0.785


@pytest.mark.slow
def test_transport_measures_each_size_and_a_soak_between_two_processes():
    done = run("transport.py", "--sizes-mb", "0.25", "1", "--repeats", "3", "--soak", "60")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["device"], document["placement"]) == ("cpu", "colocated")
    assert [round(row["megabytes"], 1) for row in document["by_size"]] == [0.3, 1.0]
    for row in document["by_size"]:
        assert 0 < row["send_best_ms"] <= row["send_ms"]
        assert row["send_fraction_of_copy"] > 0
        assert 0 < row["receive_best_ms"] <= row["receive_ms"]
    soak = document["soak"]
    for side in ("sender", "receiver"):
        assert len(soak[side]) == 3
        assert len({look["descriptors"] for look in soak[side]}) == 1
        assert soak[side][-1]["shared_bytes"] <= 2 * soak["window_bytes"]


@pytest.mark.usefixtures("on_path")
def test_transport_names_an_option_that_the_backend_does_not_know(monkeypatch):
    from transport import main

    monkeypatch.setattr(sys, "argv", ["transport.py", "--placement", "disaggregated", "no_such_option=1"])
    with pytest.raises(SpecError, match="no_such_option"):
        main()
