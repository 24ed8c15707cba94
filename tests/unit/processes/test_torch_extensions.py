"""A vendor's extension that torch would load and cannot: commands work all the same."""

import os
import subprocess
import sys

import pytest

from ...distributions import write_distribution

COMMAND = """
from spec_trainer.cli import app
app.run = lambda words: print(words, bool(__import__('torch')))
app.main()
"""
BACKEND = """
from spec_backend_cpu.backend import CpuBackend
class Plugin(CpuBackend):
    name = "wary"
    @classmethod
    def import_env(cls):
        return {wanted}
"""


@pytest.fixture
def python(tmp_path):
    """``python(code, *words)`` where an extension of torch is installed that lacks a library, and its vendor's
    backend, which wants ``wanted``."""

    def install(name, entry_points, source):
        write_distribution(tmp_path, name, entry_points)
        (tmp_path / f"{name}.py").write_text(source)

    def call(code, *words, wanted):
        install("extension", "[torch.backends]\nvendor = extension:load\n", "import no_such_library\n")
        install("wary", "[spec_core.backends]\nwary = wary:Plugin\n", BACKEND.format(wanted=wanted))
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def test_the_command_starts_again_as_its_backend_wants_it_and_torch_imports(python):
    done = python(COMMAND, "plan", "a b", wanted={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    # What anybody prints goes to standard error: standard output is for documents.
    assert (done.stdout, done.stderr) == ("", "['plan', 'a b'] True\n")


def test_nothing_starts_again_where_nothing_is_wanted(python):
    done = python(COMMAND, "plan", wanted={})
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stderr  # torch's own message


def test_what_cannot_be_imported_is_not_found_by_others_afterwards(python):
    code = (
        "import importlib.util, torch\n"
        "from spec_processes.torch_extensions import hide_broken_extensions\n"
        "before = importlib.util.find_spec('extension')\n"
        "hide_broken_extensions()\n"
        "print(before is None, importlib.util.find_spec('extension') is None)\n"
    )
    done = python(f"import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n{code}", wanted={})
    assert done.stdout == "False True\n", done.stderr
