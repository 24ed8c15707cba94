"""Real shells in a terminal of their own complete names of files that hold code, and run nothing of it."""

import os
import pty
import select
import shlex
import shutil
import signal
import time
from contextlib import contextmanager, suppress

import pytest

from spec_trainer.cli.app import run

NAMES = [
    "x$(touch${IFS}FOUND).yaml", "x`touch FOUND`.yaml", "x;touch FOUND;.yaml", "x\ntouch FOUND\n.yaml", "x$HOME.yaml",
    "x y.yaml", "x'y.yaml", 'x"y.yaml', "x\ny.yaml", "x&y|z>w<v.yaml", "x\\y.yaml", "x!y.yaml", "x*?[a].yaml",
    "x{a,b}.yaml", "x=y:z.yaml", "-x.yaml", "(x).yaml", "x\x1b[31m.yaml", "xé日.yaml",
]  # fmt: skip
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source {0}/script"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit && compinit -u -d {0}/dump; source {0}/script"),
    "fish": (["fish", "--no-config", "-i"], "source {0}/script"),
}


@contextmanager
def terminal(shell, folder):
    """Yield a terminal in which the shell has read the completion script."""
    words, start = SHELLS[shell]
    env = {"PATH": f"{folder}/bin:{os.defpath}", "HOME": str(folder), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    pid, terminal = pty.fork()
    if pid == 0:
        with suppress(OSError):
            os.execvpe(words[0], words, env)
        os._exit(127)
    try:
        os.write(terminal, f"{start.format(folder)}; touch {folder}/ready\n".encode())
        await_file(terminal, folder / "ready")
        yield terminal
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def await_file(terminal, file):
    """Wait for a file, and read meanwhile what the terminal shows, without which the shell would wait."""
    shown, deadline = b"", time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.02)[0]:
            shown += os.read(terminal, 1 << 16)


@pytest.mark.parametrize(
    ("shell", "typed"),
    [
        *((shell, "--config ") for shell in SHELLS),
        *((shell, "--data=") for shell in ("bash", "fish")),  # zsh completes no name after the sign
    ],
)
def test_the_completed_name_of_a_file_is_one_word_and_no_code(shell, typed, tmp_path, capsys):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert run(["--print-completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    program = tmp_path / "bin" / "spec-trainer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > typed.part\nmv typed.part typed\n')
    program.chmod(0o755)
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).touch()
    seen = {}
    with terminal(shell, tmp_path) as opened:
        for number, name in enumerate(NAMES):
            folder = tmp_path / str(number)
            begun = "x" if name.startswith("x") else ""
            os.write(opened, f"cd {shlex.quote(str(folder))}\rspec-trainer pla\t{typed}{begun}\t\r".encode())
            await_file(opened, folder / "typed")
            seen[name] = (folder / "typed").read_bytes().split(b"\0")[:-1]
            assert sorted(os.listdir(folder)) == sorted([name, "typed"])
    flag, space, _ = typed.partition(" ")
    expected = {name: ["plan", flag, name] if space else ["plan", f"{flag}{name}"] for name in NAMES}
    assert seen == {name: list(map(os.fsencode, words)) for name, words in expected.items()}
