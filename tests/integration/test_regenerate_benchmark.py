"""``benchmarks/regenerate.py`` shows what a command of its own says before it fails."""

import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).parents[2] / "benchmarks" / "regenerate.py"


def test_a_failed_command_is_shown_with_its_last_lines(rows_file, tmp_path):
    words = ["--target", str(tmp_path / "nowhere"), "--data", str(rows_file)]
    done = subprocess.run(
        [sys.executable, str(COMMAND), *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    *said, last = done.stderr.splitlines()
    assert len(said) <= 20
    assert str(tmp_path / "nowhere") in said[-1], "the library's own message"
    assert " own-rate " in last
    assert last.endswith(" ended with exit code 1")
