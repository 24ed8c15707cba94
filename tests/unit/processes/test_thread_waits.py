"""Threads that wait for each other sleep, unless the user has chosen otherwise."""

import os
import subprocess
import sys

import pytest

from spec_processes import let_waiting_threads_sleep

PROGRAM = "from spec_processes import let_waiting_threads_sleep as sleep; sleep(); import torch"
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def test_the_library_that_torch_brings_reads_the_policy():
    """The library itself says so: it reads the environment once, as torch loads it."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_of_the_user_stands(name):
    environment = {name: "4"}
    let_waiting_threads_sleep(environment)
    assert environment == {name: "4"}
