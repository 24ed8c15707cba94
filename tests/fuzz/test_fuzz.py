"""Damage of every kind, some dozens of times; ``make test-soak`` does these and some thousands more."""

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from spec_trainer.cli.app import run
from spec_trainer.data import render_process

from . import cases, material, servers

SEED, CASES, PARTS = 12, 75, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    material.build(folder)
    return folder


@contextmanager
def alarm(seconds):
    """Wakes what hangs; the test's own limit goes on afterwards."""

    def ring(*_):
        raise AssertionError(f"it takes more than {seconds} s")

    handler = signal.signal(signal.SIGALRM, ring)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, rest)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.xdist_group("fuzz")
@pytest.mark.filterwarnings("ignore")  # of other people's, about what is damaged
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_whatever_is_damaged_a_command_ends_in_one_line_and_creates_nothing(
    root, tmp_path, monkeypatch, capfd, part
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(render_process, "SECONDS", 0.5)
    failures = []
    for number in range(part, CASES, PARTS):
        case = cases.make_case(root, tmp_path / "case", random.Random(f"{SEED} {number}"))
        monkeypatch.chdir(case.folder)
        before = cases.contents(case)
        capfd.readouterr()
        with alarm(cases.LONGEST_S):
            code = run(case.words)
        out, err = capfd.readouterr()
        found = cases.violations(case, code, out, err)
        found += cases.changes(case, before)
        if found:
            failures.append(f"case {number}, {case.group}, {case.what}: {', '.join(found)}: {err[-500:]}")
    assert failures == []


def test_a_word_that_breaks_yaml_parsers_in_c_does_not_end_the_program(tmp_path):
    program = Path(sys.executable).with_name("spec-trainer")
    words = ["plan", "--target", "t", "--data", "d", "train.lr=" + "[" * 50_000]
    child = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert (child.returncode, child.stdout, child.stderr.count("\n")) == (2, "", 1)
    assert "is nested in more than 32 levels" in child.stderr
    assert os.listdir(tmp_path) == []
