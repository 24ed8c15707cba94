"""One process or device after the other fails in a run: it ends soon, says who and why, leaves nothing, and the same
command continues.

The tests share one directory: each resumes what the fault before it has left, and the last one shows that after all
of them the draft is bitwise the one of a run that nothing has disturbed. Any of them also works alone.
"""

import json
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from . import leftovers
from .launching import STEPS, Lab, Run
from .leftovers import Belongings, assert_nothing_left, belongings
from .run_directory import assert_bitwise_equal, assert_trained_exactly_once, newest_checkpoint

PEER_S = 3
FILE_LIMIT = 100 << 10
"""Bytes: less than a rank's part of a checkpoint, more than anything else that a rank writes."""


@pytest.fixture(scope="module")
def output(lab: Lab) -> Path:
    return lab.folder / "faults"


def start(lab: Lab, output: Path, **keys: object) -> Run:
    """One engine, two trainers."""
    return lab.start(output, **{**lab.one_and_two, "timeouts__peer_s": PEER_S, **keys})


def under_way(lab: Lab, output: Path, **keys: object) -> tuple[Run, Belongings]:
    """A run that has saved something to resume from."""
    run = start(lab, output, **keys)
    run.train_on()
    run.save_on()
    assert run.first_step == 0 or run.resumed_from() > 0
    return run, belongings(run)


def assert_fails(run: Run, held: Belongings, *words: str, peer_s: float = PEER_S) -> None:
    leftovers.assert_fails(run, held, *words, within_s=peer_s + leftovers.EXTRA_S)


@pytest.mark.slow
def test_an_engine_is_replaced_and_a_killed_trainer_ends_the_run(lab, output) -> None:
    """The engine is killed, and the one in its place stopped: the run goes on."""
    run, _ = under_way(lab, output)
    run.member("engine-0").kill()
    run.until_ready("engine-0", times=2)
    run.train_on(5)  # more than the window holds
    run.member("engine-0").send_signal(signal.SIGSTOP)
    run.until_ready("engine-0", times=3)
    run.train_on(5)
    lines = (output / "logs" / "replacements.jsonl").read_text().splitlines()
    causes = [json.loads(line)["cause"] for line in lines]
    assert causes[0].startswith("engine-0 was killed by signal 9; see ")
    assert causes[1:] == [f"engine-0 has been silent for timeouts.peer_s={PEER_S:.1f} s"]
    held = belongings(run)
    run.member("trainer-0").kill()
    assert_fails(run, held, "trainer-0 was killed by signal 9", "trainer-0.log")


@pytest.mark.slow
def test_launcher_killed(lab, output) -> None:
    """The engine has a process of its own, which the kernel does not end with the launcher's children; after
    wrong first records on every socket that the run listens on, which disturb nothing."""
    run, held = under_way(lab, output, engine__name="moody", engine__has_child="true")
    assert any("sleep" in process.name() for process in run.processes())
    assert not held.ports  # gloo listened while the ranks connected
    # By itself gloo listens where the host's name points to, which may be loopback too.
    assert run.member("trainer-0").environ()["GLOO_SOCKET_IFNAME"] == "lo"
    assert len(held.unix_names) == 2  # a receiver of features for each trainer
    _send_wrong_first_records(run, held)
    run.process.send_signal(signal.SIGKILL)
    assert run.wait(5) == -signal.SIGKILL
    assert_nothing_left(run, held)


@pytest.mark.slow
def test_schema_mismatch(lab, output) -> None:
    """In the middle of a run, and again by the engine that replaces the first one."""
    keys = {"engine__other_layers_at": 9, "engine__has_child": "true", "engine__replacements": 1}
    run = start(lab, output, engine__name="moody", **keys)
    run.until_ready("engine-0", times=2)
    words = "; engine.replacements=1 allows no other replacement"
    assert_fails(
        run, belongings(run), "engine-0: SchemaMismatch: the sender has FeatureSchema(layers=(", words
    )


@pytest.mark.slow
def test_what_the_backend_has_started_on_the_host_is_killed(lab, output) -> None:
    """All members of the run live on, and would wait."""
    run, held = under_way(lab, lab.folder / "host", backend__name="limited", train__ranks=1)
    (daemon,) = [process for process in run.processes() if process.name() == "sleep"]
    daemon.kill()
    assert_fails(run, held, f"the daemon (pid {daemon.pid}) died")


@pytest.mark.slow
def test_disk_full_at_the_checkpoint(lab, output) -> None:
    """The disk fills at one rank, in the middle of a file."""
    run, held = under_way(lab, output)
    run.member("trainer-1").rlimit(psutil.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
    assert_fails(run, held, "checkpoint", "was not written", "File too large")
    assert not list((output / "checkpoints").glob(".step-*"))
    assert newest_checkpoint(output) > 0


def test_not_ready_in_time(lab) -> None:
    """In a directory of its own, whose log shows that the workers were started: the time runs from then on."""
    run = start(lab, lab.folder / "late", timeouts__start_s=1, train__ranks=1)
    run.until((run.output / "logs" / "engine-0.log").exists)
    late = "engine-0, trainer-0 not ready within timeouts.start_s=1"
    assert_fails(run, belongings(run), late, peer_s=1)


@pytest.mark.slow
def test_after_all_faults_the_same_command_ends_bitwise_as_if_undisturbed(lab, output, uninterrupted) -> None:
    run = start(lab, output, train__restarts=1)
    run.train_on(1)
    run.member("trainer-1").kill()
    assert run.wait(150) == 0, run.story()
    again = r"trainer-1 was killed by signal 9; .*; the run begins again .* \(1 of train.restarts=1\)"
    assert re.search(again, run.errors.read_text())
    assert_trained_exactly_once(output, range(40))
    assert_bitwise_equal(output, uninterrupted, STEPS)


def _send_wrong_first_records(run: Run, held: Belongings) -> None:
    """A truncated one, a forged one, none at all."""
    silent = [_connect(name) for name in held.unix_names]
    for record in (b"\x00", b"GET / HTTP/1.1\r\n\r\n", b'{"version": 1, "token": "guess"}', b"\xff" * 4096):
        for name in held.unix_names:
            with _connect(name) as stranger, suppress(OSError):
                stranger.sendall(record)
    run.train_on(3)
    for stranger in silent:
        stranger.close()
    run.train_on(3)


def _connect(name: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(name.replace("@", "\0", 1))
    return stranger
