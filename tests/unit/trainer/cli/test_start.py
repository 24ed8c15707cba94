"""Ctrl-C and a lack of memory while the program is loaded: one line."""

import subprocess
import sys

import pytest

FAILING = """
import sys

class Failing:
    def find_spec(self, name, path=None, target=None):
        if name == "cyclopts":
            raise {error}

sys.meta_path.insert(0, Failing())
from spec_trainer.cli.start import main
main()
"""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        ("KeyboardInterrupt", 130, "interrupted"),
        ("MemoryError", 1, "error: the program cannot be loaded: MemoryError: "),
        (
            "ImportError('libx.so:\\n cannot map')",
            1,
            "error: the program cannot be loaded: ImportError: libx.so: cannot map",
        ),
    ],
)
def test_what_interrupts_the_loading_is_one_line(error, code, line):
    command = [sys.executable, "-c", FAILING.format(error=error), "plugins"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"spec-trainer: {line}\n")
