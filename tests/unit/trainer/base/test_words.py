"""No word of a command line is taken for something else than it says: for every flag of every command."""

import errno
import logging
import shlex
from types import NoneType
from typing import get_args

import pytest
from cyclopts import Token

from spec_core.errors import ConfigError
from spec_trainer.base.words import check_command_line, convert_flag
from spec_trainer.cli.app import app, run
from spec_trainer.cli.examples import EXAMPLES

COMMANDS = [name for name in app if not name.startswith("-")]


def flags(*kinds: type) -> list[tuple[str, str]]:
    """Return command and flag of every flag that takes a value of one of these kinds."""
    return [
        (command, next(name for name in argument.names if name.startswith("--")))
        for command in COMMANDS
        for argument in app[command].assemble_argument_collection()
        if any(name.startswith("--") for name in argument.names) and kinds_of(argument.hint) & set(kinds)
    ]


def kinds_of(hint: object) -> set[object]:
    return {hint, *get_args(hint)} - {NoneType}


def refusal(capsys, *words: str) -> str:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spec-trainer: error: ")
    assert err.count("\n") == 1
    assert len(err) <= 2_000
    return err


def test_the_flags_are_found():
    numbers = {flag for _, flag in flags(int, float)}
    assert {"--restarts", "--seed", "--temperature", "--timeout-s", "--bucket-bytes"} <= numbers
    assert {"--of", "--to", "--transport", "--server"} == {flag for _, flag in flags(list[str])}


NO_NUMBERS = ["null", "~", "yes", "0x1", "1_000", "1,5", "\n5", "5 ", "'5'", "٥", "."]
NO_INTEGERS = ["1.5", "1.0", "1e3", "inf"]
NEEDED = {
    "regenerate": ["--target", "t", "--data", "d", "--output", "a.jsonl"],
    "evaluate": ["--target", "t", "--draft-model", "d", "--prompts", "p"],
    "push": ["--target", "t", "--draft-model", "d", "--to", "http://127.0.0.1:1"],
    "serving": ["--of", "http://127.0.0.1:1"],
}
"""Words without which a command stops before it looks at a number."""


@pytest.mark.parametrize("value", [*NO_NUMBERS, *NO_INTEGERS])
def test_only_decimal_digits_are_an_integer(value):
    with pytest.raises(ValueError, match=r"^$"):
        convert_flag(int | None, [Token(value=value)])
    if value in NO_NUMBERS:
        with pytest.raises(ValueError, match=r"^$"):
            convert_flag(float, [Token(value=value)])


@pytest.mark.parametrize("value", ["0", "-5", "+5", "007", "1e-4", "2.5", ".5", "3."])
def test_decimal_numbers_are_taken(value):
    assert convert_flag(float | None, [Token(value=value)]) == float(value)


@pytest.mark.parametrize(("command", "flag"), flags(int, float))
def test_every_flag_with_a_number_is_read_so(capsys, command, flag):
    assert "unable to convert" in refusal(capsys, command, *NEEDED.get(command, ()), f"{flag}=null")


@pytest.mark.parametrize("words", [["--flag", ""], ["--flag", " \n"], ["--flag="], ["--flag=\t"]])
def test_an_empty_value_is_refused(words):
    """A variable of the shell that is not set gives such a word, and ``Path("")`` would be the working directory."""
    with pytest.raises(ConfigError, match=r"^--flag is empty; leave it out, or give it a value$"):
        check_command_line(["train", *words])


@pytest.mark.parametrize("words", [["", "train.lr=1"], ["plan", " "], ["train", ""]])
def test_an_empty_word_is_refused(words):
    with pytest.raises(ConfigError, match=r"^a word of the command line is empty; "):
        check_command_line(words)


def test_nul_and_endless_words_are_refused():
    with pytest.raises(ConfigError, match="holds the character NUL"):
        check_command_line(["--target", "a\0b"])
    with pytest.raises(ConfigError, match="has 70000 characters, expected at most 65536"):
        check_command_line(["--target", "x" * 70_000])


@pytest.mark.parametrize(("command", "flag"), flags(list[str]))
def test_a_list_has_a_member(capsys, command, flag):
    assert f"{flag} requires at least 1 element. Got 0" in refusal(capsys, command, flag)


def test_what_is_wrong_with_a_word_ends_every_command(capsys):
    assert "--backend is empty" in refusal(capsys, "check", "--backend", "")
    assert "no backend plugin is called 'null'" in refusal(capsys, "check", "--backend", "null")
    assert "null cannot be read: No such file or directory" in refusal(capsys, "plan", "--config", "null")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG])
def test_a_path_that_cannot_be_one_is_bad_usage(capsys, monkeypatch, code):
    def fail(*args):
        raise OSError(code, "not so", "x" * 5_000)

    monkeypatch.setattr("spec_trainer.cli.commands.convert.convert_draft", fail)
    refusal(capsys, "convert", "--draft-model", "x", "--target", "t", "--output", "o")


@pytest.mark.parametrize(
    "flag", ["--json", "--stop-at-eos", "--untrained", "--drop-cut", "--quiet", "--verbose"]
)
def test_a_switch_takes_no_other_word_for_true(flag):
    check_command_line([flag, f"{flag}=true", f"{flag}=false"])
    for word in ("yes", "1", "TRUE", "no", "null"):
        with pytest.raises(ConfigError, match=f"expected {flag} alone, or true or false$"):
            check_command_line([f"{flag}={word}"])


def test_the_switches_are_those_of_the_commands():
    everywhere = {"--quiet", "--verbose"}
    assert {flag for _, flag in flags(bool)} - everywhere == {
        "--json", "--stop-at-eos", "--untrained", "--breakdown", "--by-length", "--card", "--drop-cut",
        "--whole-target", "--serve-elsewhere", "--thorough",
    }  # fmt: skip


def test_every_command_can_be_quiet_and_verbose():
    for command in COMMANDS:
        found = {name for argument in app[command].assemble_argument_collection() for name in argument.names}
        assert {"--quiet", "--verbose"} <= found, command


def test_every_command_has_two_examples_that_parse():
    assert EXAMPLES.keys() == set(COMMANDS)
    for command, examples in EXAMPLES.items():
        assert len(set(examples)) == 2
        for words in examples:
            function, bound, _ = app.parse_args(
                [command, *shlex.split(words)], exit_on_error=False, print_error=False
            )
            assert function.__module__.startswith("spec_trainer.cli.")
            overrides = bound.arguments.get("overrides", ())
            assert all("=" in word for word in overrides)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_the_examples(capsys, command):
    assert run([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in EXAMPLES[command]:
        assert f"spec-trainer {command} {words}".strip() in shown


def test_quiet_and_verbose_change_what_is_shown(capsys, caplog):
    plugin = logging.getLogger("spec_engine_hf.engine")
    for flag, level in (("--quiet", "WARNING"), ("--verbose", "DEBUG"), ("--json", "INFO")):
        assert run(["plugins", flag]) == 0
        assert logging.getLevelName(plugin.getEffectiveLevel()) == level
    capsys.readouterr()
    assert "--quiet and --verbose exclude each other" in refusal(capsys, "plugins", "--quiet", "--verbose")
