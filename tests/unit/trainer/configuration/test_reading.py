"""Strict configuration: what is wrong is named with its key, its value and what to do, in one line."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pydantic
import pytest

from spec_core.config import Config, DraftConfig, EngineConfig
from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_trainer.configuration import dump_yaml, read_configuration, read_resolved


class Train(Config):
    lr: float = 1e-3
    steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    clip: bool = True

    @pydantic.field_validator("lr")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(f"{value} is not positive; leave it out for the default")
        return value


class Run(Config):
    target: str
    output: Path = Path("runs/run")
    train: Train = Train()
    draft: DraftConfig = DraftConfig()


def resolve(tmp_path: Path, text: str | None = None, *words: str, **flags: object) -> Run:
    file = None
    if text is not None:
        file = tmp_path / "run.yaml"
        file.write_text(text)
    return validate(Run, read_configuration(file, flags, words), "run.yaml")


def refusal(tmp_path: Path, text: str | None = None, *words: str, **flags: object) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve(tmp_path, text, *words, **flags)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_file_then_flags_then_overrides(tmp_path):
    text = "target: file\noutput: file\ntrain: {lr: 0.5, steps: 5, clip: false}\n"
    run = resolve(tmp_path, text, "train.lr=0.25", **{"output": Path("flag"), "train.lr": 0.125})
    assert run == Run(target="file", output=Path("flag"), train=Train(lr=0.25, steps=5, clip=False))


def test_a_file_wins_over_the_defaults_of_a_command(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {lr: 0.5}\n")
    defaults = {"train.lr": 0.25, "train.steps": 7, "target": "t"}
    merged = read_configuration(tmp_path / "run.yaml", {"target": "u"}, ["train.clip=false"], defaults)
    assert merged == {"target": "u", "train": {"lr": 0.5, "steps": 7, "clip": False}}
    assert read_configuration(None, {}, [], defaults) == {"target": "t", "train": {"lr": 0.25, "steps": 7}}


def test_defaults_are_in_the_fields(tmp_path):
    assert resolve(tmp_path, None, "target=t") == Run(target="t")


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_a_number_is_a_number_however_it_is_written(tmp_path, text):
    assert resolve(tmp_path, None, "target=t", f"train.lr={text}").train.lr == 1e-4
    assert resolve(tmp_path, f"target: t\ntrain:\n  lr: {text}\n").train.lr == 1e-4


def test_override_takes_lists_null_paths_and_equals_signs(tmp_path):
    words = ["target=a=b", "train.betas=[0.5, 0.75]", "train.steps=null", "draft.init_from=some/folder"]
    run = resolve(tmp_path, None, *words)
    assert run.target == "a=b"
    assert run.train.betas == (0.5, 0.75)
    assert run.train.steps is None
    assert run.draft.init_from == Path("some/folder")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trian.lr=1", "unknown section or key 'trian' (did you mean 'train'?)"),
        ("train.step=1", "unknown key 'train.step' (did you mean 'steps'?)"),
        ("train.wumpus=1", "unknown key 'train.wumpus' (known: betas, clip, lr, steps)"),
        ("draft.init_form=x", "unknown key 'draft.init_form' (did you mean 'init_from'?)"),
        ("outptu=x", "unknown section or key 'outptu' (did you mean 'output'?)"),
        ("lr=1", "unknown section or key 'lr' (did you mean 'train.lr'?)"),
    ],
)
def test_unknown_key_comes_with_a_suggestion(tmp_path, word, expected):
    assert refusal(tmp_path, None, "target=t", word) == f"run.yaml: {expected}"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.steps=5.5", "train.steps=5.5: Input should be a valid integer"),
        ("train.steps='5'", "train.steps='5': Input should be a valid integer"),
        ("train.clip=1", "train.clip=1: Input should be a valid boolean"),
        ("train.lr=fast", "train.lr='fast': Input should be a valid number"),
        ("target=5", "target=5: Input should be a valid string"),
        ("train.lr=.inf", "train.lr"),
        ("train.lr=.nan", "train.lr"),
        ("train.betas=[0.5]", "train.betas"),
        ("train=5", "train=5: expected a section, with keys such as train.lr"),
        ("target.lr=5", "target={'lr': 5}: Input should be a valid string"),
        ("train.lr=-1", "train.lr: -1.0 is not positive; leave it out for the default"),
    ],
)
def test_wrong_type_names_key_value_and_expectation(tmp_path, word, expected):
    assert refusal(tmp_path, None, "target=t", word).startswith(f"run.yaml: {expected}")


def test_unknown_key_is_said_before_the_missing_one_that_it_stands_for(tmp_path):
    assert refusal(tmp_path, None, "tarrget=t") == (
        "run.yaml: unknown section or key 'tarrget' (did you mean 'target'?)"
    )


def test_override_may_refer_to_another_key(tmp_path):
    assert resolve(tmp_path, "target: t\n", "output=runs/${target}").output == Path("runs/t")


def test_required_key_is_named(tmp_path):
    assert refusal(tmp_path) == "run.yaml: target is required, such as target=VALUE"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.lr", "override 'train.lr' is not of the form section.key=value"),
        ("=5", "override '=5' is not of the form section.key=value"),
        ("train.betas=[1,", "override 'train.betas=[1,': the value is not YAML: "),
        ("target=${nowhere}", "${nowhere}: there is no key of that name"),
    ],
)
def test_malformed_override_is_quoted(tmp_path, word, expected):
    assert refusal(tmp_path, None, "target=t", word).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target: [1,\n", "is not YAML"),
        ("target: a\ntarget: b\n", "is not YAML"),
        ("- a\n- b\n", "holds no mapping of sections"),
    ],
)
def test_file_that_is_no_mapping_is_named(tmp_path, text, expected):
    assert refusal(tmp_path, text).startswith(f"config file {tmp_path / 'run.yaml'} {expected}")


def test_malformed_file_gives_its_line(tmp_path):
    assert "line 3" in refusal(tmp_path, "target: t\ntrain:\n  lr: [1\nsteps: 2\n")


def test_binary_file_is_not_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00target")
    with pytest.raises(ConfigError, match=r"run\.yaml is not YAML"):
        read_configuration(file, {}, [])


@pytest.mark.parametrize(
    ("name", "reason"), [("missing.yaml", "cannot be read: No such file"), (".", "is not a regular file")]
)
def test_file_that_cannot_be_read_is_named(tmp_path, name, reason):
    with pytest.raises(ConfigError, match=f"^{tmp_path / name} {reason}"):
        read_configuration(tmp_path / name, {}, [])


def test_empty_file_is_an_empty_mapping(tmp_path):
    assert resolve(tmp_path, "", "target=t") == Run(target="t")


def test_configuration_is_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Run(target="t").target = "u"  # type: ignore[misc]


def test_dumped_yaml_reads_back_equal(tmp_path):
    run = Run(
        target="ü: [x]", train=Train(lr=1e-7, betas=(0.1, 0.2)), draft=DraftConfig(init_from=Path("a/b"))
    )
    assert resolve(tmp_path, dump_yaml(run)) == run
    assert dump_yaml(resolve(tmp_path, dump_yaml(run))) == dump_yaml(run)


def test_bounds_of_the_engines_keys_hold():
    with pytest.raises(ConfigError, match=r"replicas=0: Input should be greater than or equal to 1"):
        validate(EngineConfig, {"replicas": 0}, "flags")


# --- what must not reach a parser, and what a parser makes of it ---------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[" * 500, "is nested in more than 32 levels"),
        ("[" * 50_000, "is nested"),  # the parser's own limit may come first (libyaml 0.2.6)
        ("{a: " * 10_000, "is nested in more than 32 levels"),
        ("x" * 100_000, "has 100009 characters, expected at most 65536"),
        ("!!int x", "the value is not YAML: invalid literal"),
        ("!!bool x", "the value is not YAML: KeyError: 'x'"),
        ("9" * 5_000, "the value is not YAML: Exceeds the limit (4300 digits)"),
        ("\udcff", "is not Unicode"),
    ],
    ids=["brackets", "many brackets", "braces", "long", "int tag", "bool tag", "digits", "surrogate"],
)
def test_a_word_that_would_break_a_parser_is_one_line(tmp_path, value, expected):
    line = refusal(tmp_path, None, "target=t", f"train.lr={value}")
    assert expected in line
    assert len(line) < 1_000


def test_a_key_of_endless_depth_is_refused(tmp_path):
    assert "nested in more than 32 levels" in refusal(tmp_path, None, "a" + ".a" * 5_000 + "=1")


def test_a_number_that_json_cannot_write_is_refused(tmp_path):
    for key in ("train.steps", "draft"):
        with pytest.raises(ConfigError, match=r"is not YAML: Exceeds the limit \(4300"):
            read_configuration(None, {}, [f"{key}=1" + "0" * 5_000])


@pytest.mark.parametrize(
    "number", ["0x1", "0b1", "010", "1_000", "1:30", "-0x1F", "1_0.5", "[1, 0x2]", "{a: 00}"]
)
def test_a_number_that_is_not_decimal_is_refused_in_words_and_files(tmp_path, number):
    """In YAML 1.1, 010 is 8 and 1:30 is 90."""
    for line in (
        refusal(tmp_path, None, "target=t", f"train.steps={number}"),
        refusal(tmp_path, f"target: t\ntrain: {{steps: {number}}}\n"),
    ):
        assert line.endswith("is not a decimal number; write decimal digits, or quotes around a text")


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "NO"])
def test_booleans_are_true_and_false(tmp_path, word):
    for line in (
        refusal(tmp_path, None, "target=t", f"data.shuffle={word}"),
        refusal(tmp_path, f"target: t\ndata: {{shuffle: {word}}}\n"),
    ):
        assert line.endswith(f"{word!r} is neither true nor false; write one, or quotes around a text")
    assert read_configuration(None, {}, [f"key='{word}'"]) == {"key": word}
    assert read_configuration(None, {"draft.name": word}, []) == {"draft": {"name": word}}


@pytest.mark.parametrize(
    "text", ["'0x1'", '"1_000"', "0x1g", "1:99", "0", "-1", "0.5", "1e-4", "a_1", "10.0.0.1:80"]
)
def test_texts_and_decimal_numbers_are_read_as_they_stand(text):
    (value,) = read_configuration(None, {}, [f"key={text}"]).values()
    assert str(value) == {"1e-4": "0.0001"}.get(text, text.strip("'\""))


@pytest.mark.parametrize(
    "word", ["train[lr]=5", "train..lr=5", ".lr=5", "train.=5", "train .lr=5", " train.lr=5", "[0]=1"]
)
def test_a_key_has_one_spelling(tmp_path, word):
    assert refusal(tmp_path, None, word).endswith("is not of the form section.key=value")


@pytest.mark.parametrize("word", ["train.lr=\n5", "train.lr= 5", "train.lr=5\n", "train.lr=5 "])
def test_white_space_around_a_value_is_refused(tmp_path, word):
    assert "has white space around its value; remove it" in refusal(tmp_path, None, word)


def test_a_text_with_nul_is_refused(tmp_path):
    assert "holds the character NUL" in refusal(tmp_path, None, r'output="a\0b"')
    assert "holds the character NUL" in refusal(tmp_path, 'target: "a\\0b"\n')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: " + "[" * 500, "is nested in more than 32 levels"),
        ("a: " + "[" * 20_000, "is nested"),
        ("".join("  " * level + "a:\n" for level in range(100)), "is nested in more than 32 levels"),
        ("target: " + "x" * (1 << 20), "bytes, expected at most 1048576"),
        ("train: {lr: !!int x}", "is not YAML: invalid literal"),
    ],
    ids=["brackets", "many brackets", "indents", "long", "int tag"],
)
def test_a_file_that_would_break_a_parser_is_one_line(tmp_path, text, expected):
    assert expected in refusal(tmp_path, text)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml is not a regular file"):
        read_configuration(tmp_path / "run.yaml", {}, [])


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_value_is_a_variable_that_was_not_set(tmp_path, text):
    assert refusal(tmp_path, None, f"draft.init_from={text}") == (
        "draft.init_from= is empty; leave the word out, or write null"
    )
    assert resolve(tmp_path, None, "target=t", "draft.init_from=null").draft.init_from is None


def test_long_values_are_shortened_in_messages(tmp_path):
    line = refusal(tmp_path, None, "target=t", "train.lr=" + "x" * 60_000)
    assert line.startswith("run.yaml: train.lr='xxx")
    assert (
        line.endswith("xxx': Input should be a valid number, unable to parse string as a number")
        or len(line) < 400
    )


def test_a_resolved_configuration_is_read_as_it_stands(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(Run(target="${oc.env:HOME} ${train.lr}", train=Train(lr=1e-7))))
    values = read_resolved(file)
    assert values["target"] == "${oc.env:HOME} ${train.lr}"
    assert validate(Run, values, "config.yaml").train.lr == 1e-7


def test_aliases_that_grow_without_end_are_refused_and_others_are_not(tmp_path):
    file = tmp_path / "config.yaml"
    pairs = itertools.pairwise("abcdefghi")
    lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairs]
    file.write_text("a: &a [x]\n" + "".join(lines))
    for read in (read_resolved, lambda path: read_configuration(path, {}, [])):
        with pytest.raises(ConfigError, match="has more than 131072 values, with its aliases written out"):
            read(file)
    file.write_text("a: &a {b: 1}\nc: *a\n")
    assert read_resolved(file) == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a [*a]\n", "is not YAML: Circular reference detected"),
        ("a: {b: 1, c: 2, b: 3}\n", "is not YAML: found duplicate key b"),
        ("? [1, 2]\n: 3\n", "found unhashable key"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ('a: !!python/object/apply:os.system ["x"]\n', "could not determine a constructor"),
    ],
)
def test_yaml_that_is_no_configuration_is_one_line(tmp_path, text, expected):
    assert expected in refusal(tmp_path, text)


def test_a_mapping_takes_keys_of_another_that_it_does_not_have_itself(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("x: {a: &a {<<: {k: 0, l: 0}, k: 1}}\nb: {<<: *a, l: 2}\n")
    assert read_configuration(file, {}, []) == {"x": {"a": {"k": 1, "l": 0}}, "b": {"k": 1, "l": 2}}


def test_a_date_is_a_text():
    assert read_configuration(None, {}, ["a=2026-01-31", "b=[1e5, 1.5E3, -1e-3]"]) == {
        "a": "2026-01-31",
        "b": [1e5, 1.5e3, -1e-3],
    }


def test_a_later_layer_adds_to_mappings_and_replaces_anything_else(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("a: {b: [1, 2], c: {d: 1}}\ne: null\n")
    words = ["a.b=[3]", "a.c.f=2", "e.g=4", "a.c={h: 5}", "i=1", "i=null"]
    assert read_configuration(file, {}, words) == {
        "a": {"b": [3], "c": {"d": 1, "f": 2, "h": 5}},
        "e": {"g": 4},
        "i": None,
    }
