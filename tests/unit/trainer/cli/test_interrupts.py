"""Ctrl-C does not end a process while it loads torch, unless that hangs."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import signal, sys, time
from spec_trainer.cli import interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in a shell's background inherit that it is ignored
interrupts._LONGEST_S = float(sys.argv[1])
interrupts.interrupt_once_torch_is_loaded()
try:
    __import__(sys.argv[2])
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
SLOW = """
import time

try:
    print("importing", flush=True)
    time.sleep(1)
except KeyboardInterrupt:
    print("within", flush=True)
    raise
print("imported", flush=True)
"""


@pytest.mark.parametrize(
    ("longest_s", "module", "lines"),
    [
        (60, "torch", ["imported", "interrupted"]),
        (0.2, "torch", ["within", "interrupted"]),
        (60, "other", ["within", "interrupted"]),
    ],
)
def test_ctrl_c_waits_until_torch_is_loaded_but_not_for_ever(tmp_path, longest_s, module, lines):
    (tmp_path / f"{module}.py").write_text(SLOW)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, tmp_path / "program.py", str(longest_s), module]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert process.stdout.read().splitlines() == lines
        assert time.monotonic() - begun < 30


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from spec_trainer.cli.interrupts import interrupt_once_torch_is_loaded as f; f()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
