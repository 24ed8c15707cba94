"""Exit codes and lines: what each way to end looks like to whoever typed the command."""

from __future__ import annotations

import json

import pytest

from spec_core.errors import ConfigError, EngineError
from spec_trainer.cli import RunFlags, run
from spec_trainer.interrupted import Interrupted


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

    monkeypatch.setattr("spec_trainer.resolve.resolve", end)
    assert run(["--target", "t"]) == code
    assert capsys.readouterr() == ("", line + "\n")


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr("spec_trainer.resolve.resolve", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["train"])


def test_flags_are_short_forms_of_keys():
    flags = RunFlags(backend="a", draft="b", target="c", data="d", engine="e", strategy="f", launcher="g")
    assert flags.as_keys() == {
        "backend.name": "a", "draft.name": "b", "target": "c", "data.path": "d", "engine.name": "e",
        "train.strategy": "f", "launcher.name": "g",
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

    monkeypatch.setattr("spec_trainer.resolve.resolve", end)
    assert run(words) == 2
    config, keys, overrides = seen
    assert (config, keys) == (None, {"target": "t", "placement.kind": "inline"})
    assert list(overrides) == ["train.lr=1", "seed=2"]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_check_exits_1_where_a_step_has_failed(monkeypatch, capsys, ok, code):
    report = {"backend": "cpu", "ok": ok, "steps": [{"step": "device", "ok": ok}]}
    monkeypatch.setattr("spec_trainer.self_test.run_self_test", lambda name: {**report, "backend": name})
    assert run(["check", "--backend", "cpu", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == report
