"""A process of its own, started as no terminal would: streams closed, folder removed, COLUMNS or ASCII set."""

import os
import subprocess
import sys

import pytest

from spec_trainer.cli.app import run

PROGRAM = [sys.executable, "-c", "from spec_trainer.cli.app import main; main()"]


def spec_trainer(words, tmp_path, shell="exec", **env):
    """Run a command by a shell whose line begins with ``shell``; return code, output and errors."""
    command = ["sh", "-c", f'{shell} "$@"', "sh", *PROGRAM, *words]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
    done = subprocess.run(
        command, capture_output=True, timeout=60, check=False, cwd=tmp_path, env=env, encoding="utf-8"
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("columns", ["0", "1", "x", "2000000000", "9" * 20])
def test_help_ends_whatever_the_width(monkeypatch, capsys, columns, flag):
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["push", flag]) == 0
    out, err = capsys.readouterr()
    assert ("--draft-model" in out, err) == (True, "")


def test_help_of_which_only_the_first_line_is_read_ends_well(tmp_path):
    line = '"$@" | head -1; test "${PIPESTATUS[0]}" = 0'
    command = ["bash", "-c", line, "bash", *PROGRAM, "train", "--help"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=tmp_path, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "spec-trainer train" in done.stdout


def test_a_removed_working_directory_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    code, out, err = spec_trainer(["plugins"], tmp_path, "cd gone; rmdir ../gone; exec")
    assert (code, out) == (2, "")
    assert err == "spec-trainer: error: the working directory was removed; change to one that is there\n"


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [(">&-", "", ""), ("2>&-", "0.1", ""), ("<&-", "0.1", ""), (">&- 2>&- <&-", "", "")],
)
def test_closed_streams_cost_nothing_but_what_goes_there(tmp_path, closed, out, err):
    code, printed, errors = spec_trainer(["--version"], tmp_path, f"exec {closed};")
    assert (code, printed[:3], errors) == (0, out, err)


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """Whatever is printed would be written into that file."""
    look = "from spec_trainer.cli.surroundings import open_closed_streams as f; f(); print(open('file').fileno())"
    (tmp_path / "file").touch()
    command = ["sh", "-c", 'exec <&- 2>&-; exec "$@"', "sh", sys.executable, "-c", look]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    assert int(done.stdout) > 2


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_an_ascii_terminal_gets_escapes(tmp_path, env):
    code, _, err = spec_trainer(["plan", "--target", "nowhéré", "--data", "x"], tmp_path, LC_ALL="C", **env)
    assert code == 2
    assert err.startswith("spec-trainer: error: ")
    assert err.isascii()
    names = "keep_stdout_for_documents, print_text"
    look = f"from spec_trainer.cli.documents import {names} as p; {names[:25]}(); p('\\xe9 \\u03c4 \\udcff')"
    done = subprocess.run(
        [sys.executable, "-c", look],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "LC_ALL": "C", **env},
    )
    assert done.stdout == rb"\xe9 \u03c4 \udcff" + b"\n"


@pytest.mark.parametrize("kilobytes", [800_000, 2_500_000])
def test_an_address_space_too_small_for_libraries_is_named_at_once(tmp_path, kilobytes):
    code, out, err = spec_trainer(
        ["plan", "--target", "t", "--data", "d"], tmp_path, f"ulimit -v {kilobytes}; exec"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"the address space is limited to {kilobytes} kB (ulimit -v), expected at least 2621440 kB" in err
    assert spec_trainer(["--version"], tmp_path, f"ulimit -v {kilobytes}; exec")[0] == 0


def test_an_address_space_of_3_gb_is_enough(tmp_path):
    code, _, err = spec_trainer(["plan", "--target", "t", "--data", "d"], tmp_path, "ulimit -v 3000000; exec")
    assert code == 2
    assert "address space" not in err
