"""One process after the other fails in a colocated run, which then ends within 30 seconds, says in one line who and
why, and leaves nothing; the same command goes on from the last checkpoint.

::

    pytest tests/gpu/test_faults.py

The tests share one directory: each resumes what the fault before it has left. Any of them also works alone.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest

from ..integration.launching import Lab, Run
from ..integration.leftovers import Belongings, assert_fails, assert_nothing_left, belongings
from ..integration.run_directory import assert_trained_exactly_once, losses
from .conftest import BACKEND, LONG_TOKENS
from .device_state import mps_processes

PEER_S = 10
"""More than the longest time that a compilation of a kernel stops every thread of a process."""
END_S = 30
TINY_FRACTION = 5e-4
"""About 70 MiB of an H200: the target and its short samples fit, the long one does not."""
SAMPLES = range(40)
STEPS = 60


@pytest.fixture(scope="module")
def output(lab: Lab) -> Path:
    return lab.folder / "faults"


def under_way(lab: Lab, output: Path, **keys: object) -> tuple[Run, Belongings]:
    """A run that has saved something to resume from."""
    run = lab.start(output, **{"timeouts__peer_s": PEER_S, **keys})
    run.train_on()
    run.save_on()
    assert run.first_step == 0 or run.resumed_from() > 0, run.story()
    return run, belongings(run)


@pytest.mark.parametrize("victim", ["engine-0", "trainer-0"])
def test_killed(lab, output, victim) -> None:
    """In the middle of its work on a device that the other one shares."""
    run, held = under_way(lab, output)
    run.member(victim).kill()
    assert_fails(run, held, f"{victim} was killed by signal 9", f"{victim}.log", within_s=END_S)


@pytest.mark.parametrize("victim", ["engine-0", "trainer-0"])
def test_stopped(lab, output, victim) -> None:
    run, held = under_way(lab, output)
    run.member(victim).send_signal(signal.SIGSTOP)
    assert_fails(run, held, f"{victim} has been silent for timeouts.peer_s={PEER_S}", within_s=END_S)


@pytest.mark.usefixtures("needs_gpu")
@pytest.mark.parametrize("victim", ["nvidia-cuda-mps-server", "nvidia-cuda-mps-control"])
def test_mps_killed(lab, output, victim) -> None:
    others = mps_processes(victim)
    run, held = under_way(lab, output)
    if "take turns" in (said := run.errors.read_text()):
        pytest.skip(f"MPS does not work on this machine: {said.splitlines()[0]}")
    (pid,) = set(mps_processes(victim)) - set(others)
    psutil.Process(pid).kill()
    assert_fails(run, held, f"{victim} (pid {pid}) died", "MPS", within_s=END_S)


def test_launcher_killed(lab, output) -> None:
    run, held = under_way(lab, output)
    run.process.send_signal(signal.SIGKILL)
    assert run.wait(5) == -signal.SIGKILL
    assert_nothing_left(run, held, within_s=END_S)


@pytest.mark.usefixtures("needs_gpu")
@pytest.mark.parametrize(("victim", "fraction"), [("engine-0", "engine"), ("trainer-0", "trainer")])
def test_out_of_memory(lab, victim, fraction) -> None:
    """One sample of the data needs more than the limit lets the process have; the device has plenty."""
    rows = lab.folder / f"long-for-{victim}.jsonl"
    long = {"input_ids": [token % 97 for token in range(LONG_TOKENS)], "loss_mask": [1] * LONG_TOKENS}
    rows.write_text((lab.folder / "rows.jsonl").read_text() + json.dumps(long) + "\n")
    run = lab.start(
        lab.folder / f"memory-{victim}",
        data__path=rows,
        data__max_length=LONG_TOKENS,
        data__eval_samples=0,
        engine__batch_tokens=LONG_TOKENS,
        timeouts__peer_s=PEER_S,
        backend__mps_threads="shared",
        **{f"placement__{fraction}_fraction": TINY_FRACTION},
    )
    run.until((run.output / "logs" / f"{victim}.log").exists)
    assert run.wait(120) == 1, run.story()
    assert_fails(run, belongings(run), victim, "out of memory", within_s=1)


@pytest.mark.usefixtures("needs_gpu")
def test_fractions_that_do_not_fit_are_refused_before_anything_starts(lab) -> None:
    refused = lab.plan(placement__engine_fraction=0.5, placement__trainer_fraction=0.5)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "placement.engine_fraction=0.5" in line
    assert "lower" in line
    planned = json.loads(lab.plan().stdout)
    needs = [p["limit_bytes"] + p["uncounted_bytes"] for p in planned["device_memory"].values()]
    assert 0.99 * planned["device_bytes"] < sum(needs) <= planned["device_bytes"]


def test_after_all_of_it_the_same_command_goes_on_and_leaves_nothing(lab, output) -> None:
    run, held = under_way(lab, output)
    run.train_on(5)
    run.process.terminate()
    assert run.wait(60) == 130, run.story()
    assert_trained_exactly_once(output, SAMPLES)
    assert_nothing_left(run, held)


def test_a_run_that_was_killed_ends_with_the_losses_of_one_that_was_not(lab) -> None:
    undisturbed, killed = lab.folder / "undisturbed", lab.folder / "killed"
    lab.train(undisturbed, train__steps=STEPS)
    run, held = under_way(lab, killed, train__steps=STEPS)
    run.member("engine-0").kill()
    assert_fails(run, held, "engine-0 was killed by signal 9", within_s=END_S)
    resumed = lab.train(killed, train__steps=STEPS)
    assert 0 < resumed.resumed_from() < STEPS
    assert_trained_exactly_once(killed, SAMPLES)
    tolerance = 1e-2 if BACKEND == "cuda" else 1e-5  # sums on a GPU are in no fixed order
    assert losses(killed) == pytest.approx(losses(undisturbed), rel=tolerance)
