"""Reports of leaks that Triton prints after the end of a command stay off the terminal."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, types
from spec_trainer.cli.leak_reports import drop_leak_reports

class Leaked:
    def __del__(self, write=os.write):
        write(2, b"leaked 514 functions!")

drop_leak_reports()
sys.modules[{name!r}] = types.SimpleNamespace(left=Leaked())
print("the command's last line", file=sys.stderr)
"""


@pytest.mark.parametrize(("name", "shown"), [("triton", ""), ("another", "leaked 514 functions!")])
def test_reports_of_leaks_are_dropped_and_nothing_else(name, shown):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(name=name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, f"the command's last line\n{shown}")
