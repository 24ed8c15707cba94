"""Exit codes and lines: what each way to end looks like to whoever typed the command."""

import json
import shutil
import subprocess

import pytest

from spec_core.errors import ConfigError, EngineError, RunError
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.cli.app import RunFlags, run
from spec_trainer.cli.last_resort import unforeseen_errors


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("wrong"), 2, "spec-trainer: error: wrong"),
        (EngineError("failed\n  in two lines"), 1, "spec-trainer: error: failed in two lines"),
        (
            OSError(28, "No space left on device"),
            1,
            "spec-trainer: error: [Errno 28] No space left on device",
        ),
        (Interrupted("interrupted; saved x"), 130, "spec-trainer: interrupted; saved x"),
        (KeyboardInterrupt(), 130, "spec-trainer: interrupted"),
    ],
)
def test_every_end_has_its_code_and_one_line(monkeypatch, capsys, error, code, line):
    def end(*args):
        raise error

    monkeypatch.setattr("spec_trainer.plan.resolve.resolve", end)
    assert run(["--target", "t"]) == code
    assert capsys.readouterr() == ("", line + "\n")


class Panic(BaseException):
    """As compiled libraries raise."""


@pytest.mark.parametrize(
    ("bug", "line"),
    [
        (ZeroDivisionError("division\nby zero"), "unforeseen ZeroDivisionError: division"),
        (ValueError("x"), "unforeseen ValueError: x"),
        (Panic("at 0"), "unforeseen Panic: at 0"),
        (RecursionError(), "unforeseen RecursionError: it is nested too deeply"),
        (SystemExit(0), "unforeseen SystemExit: 0"),
    ],
)
def test_a_bug_is_one_line_and_its_traceback_is_kept(monkeypatch, capsys, tmp_path, bug, line):
    def fail(*args):
        raise bug

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("spec_trainer.plan.resolve.resolve", fail)
    assert run(["train"]) == 1
    (file,) = (tmp_path / "spec-trainer").iterdir()
    assert capsys.readouterr() == ("", f"spec-trainer: error: {line}; its traceback is in {file}\n")
    assert "Traceback (most recent call last)" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_bug_of_a_run_is_kept_with_its_logs_and_elsewhere_without(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for logs, folder in ((tmp_path, tmp_path), (tmp_path / "nowhere", tmp_path / "cache")):
        expected = rf"^unforeseen KeyError: 'x'; its traceback is in {folder}"
        with pytest.raises(RunError, match=expected), unforeseen_errors(logs):
            raise KeyError("x")


def test_a_line_holds_nothing_that_a_terminal_obeys_and_is_short(monkeypatch, capsys):
    def fail(*args):
        raise ConfigError("a\x1b[31m" + "x" * 10_000 + ": do this")

    monkeypatch.setattr("spec_trainer.plan.resolve.resolve", fail)
    assert run(["train"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("spec-trainer: error: a\\x1b[31mxxx")
    assert line.endswith(": do this\n")
    assert len(line) <= 2_000


def test_flags_are_short_forms_of_keys():
    flags = RunFlags(backend="a", draft="b", target="c", data="d", engine="e", strategy="f", launcher="g")
    assert flags.as_keys() == {
        "backend.name": "a", "draft.name": "b", "target": "c", "data.path": "d", "engine.name": "e",
        "strategy.name": "f", "launcher.name": "g",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "t", "--placement", "inline", "train.lr=1", "seed=2"],
        ["train", "train.lr=1", "--target", "t", "seed=2", "--placement=inline"],
    ],
)
def test_train_is_the_default_command_and_words_may_stand_anywhere(monkeypatch, words):
    seen = []

    def end(*args):
        seen.extend(args)
        raise ConfigError("enough")

    monkeypatch.setattr("spec_trainer.plan.resolve.resolve", end)
    assert run(words) == 2
    config, keys, overrides = seen
    assert (config, keys) == (None, {"target": "t", "placement.kind": "inline"})
    assert list(overrides) == ["train.lr=1", "seed=2"]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_check_exits_1_where_a_step_has_failed(monkeypatch, capsys, ok, code):
    report = {"backend": "cpu", "ok": ok, "steps": [{"step": "device", "ok": ok}]}
    monkeypatch.setattr(
        "spec_trainer.cli.commands.check.check_backend", lambda name, thorough: {**report, "backend": name}
    )
    assert run(["check", "--backend", "cpu", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == report


def test_the_shell_completes_commands_and_options(capsys, tmp_path):
    assert run(["--print-completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "chats.jsonl").touch()
    for words, expected in (
        (["pl"], {"plan", "plugins"}),
        (["evaluate", "--draft"], {"--draft", "--draft-model"}),
        (["plan", "--engine", "h"], {"hf"}),
        (["plan", "--data", f"{tmp_path}/ch"], set()),  # readline completes it
        (["train", "train.global"], {"train.global_batch_tokens="}),
        (["train", "draft.num_st"], {"draft.num_steps="}),
    ):
        typed = " ".join(["spec-trainer", *words])
        ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _spec_trainer_all; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", f"source {script}; {ask}"], capture_output=True, text=True, check=True
        )
        assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_no_plugins_name_is_code_for_the_shell(capsys, tmp_path, monkeypatch, shell):
    """Whoever sources the script would run it, without a command that imports the plugin."""
    info = tmp_path / "spec_odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spec-odd\nVersion: 1\n")
    names = ("odd$(touch found)", "odd' ; touch found ; '", "odd.good")
    groups = (
        f"[spec_core.{kind}]\n" + "".join(f"{name} = odd:Odd\n" for name in names)
        for kind in ("drafts", "trackers")
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert "odd.good" in script
    assert "touch" not in script


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_options(capsys, tmp_path):
    assert run(["--print-completion", "fish"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "chats.jsonl").touch()
    for typed, expected in (
        ("evaluate --draft", "--draft-model"),
        ("plan --engine h", "hf"),
        (f"plan --data {tmp_path}/ch", f"{tmp_path}/chats.jsonl"),
        ("train train.global", "train.global_batch_tokens="),
    ):
        ask = f"source {tmp_path}/completion; complete -C 'spec-trainer {typed}'"
        done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True, check=True)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [expected]


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize("take", ["source {}/_spec-trainer", "fpath=({} $fpath)"], ids=["source", "fpath"])
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("evaluate --draft-m", "--draft-model"),
        ("plan --backend asc", "end"),
        ("train train.global", "_batch_tokens="),
        ("plan --data {}/ch", "ats.jsonl"),
    ],
)
def test_zsh_completes_however_the_script_is_taken(capsys, tmp_path, take, typed, completed):
    """In a terminal of its own, where zsh has a line editor to complete in."""
    assert run(["--print-completion", "zsh"]) == 0
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "_spec-trainer").write_text(capsys.readouterr().out)
    start = [take.format(tmp_path), f"autoload -Uz compinit && compinit -u -d {tmp_path}/dump"]
    start = "; ".join(reversed(start) if "source" in take else start)
    typing = f"""
        zmodload zsh/zpty
        zpty shell 'zsh -f -i'
        zpty -w shell 'stty -echo; {start}; print REA""DY'
        zpty -r shell line '*READY*'
        zpty -w -n shell $'spec-trainer {typed.format(tmp_path)}\\t'
        zpty -r shell line '*{completed}*'
        print completed
    """
    done = subprocess.run(["zsh", "-f", "-c", typing], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.endswith("completed\n")
