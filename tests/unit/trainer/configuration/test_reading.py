"""Strict configuration: what is wrong is named with its key, its value and what to do, in one line."""

import os
import re
from pathlib import Path

import pydantic
import pytest

from spec_core import Config, DraftConfig, EngineConfig
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
    assert resolve(tmp_path, None, "target=t", "draft.init_from=null").draft.init_from is None


def is_like(line: str, expected: str) -> bool:
    """``…`` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), line) is not None


NO_FORM = "override … is not of the form section.key=value"


NO_FILE = "config file FILE is not YAML…"


DEEP = "…is nested in more than 32 levels…"


WHITE = "…has white space around its value; remove it…"


LONG_NUMBER = "9" * 5_000


WRONG_WORDS = [
    ("trian.lr=1", "run.yaml: unknown section or key 'trian' (did you mean 'train'?)"),
    ("train.step=1", "run.yaml: unknown key 'train.step' (did you mean 'steps'?)"),
    ("train.wumpus=1", "run.yaml: unknown key 'train.wumpus' (known: betas, clip, lr, steps)"),
    ("draft.init_form=x", "run.yaml: unknown key 'draft.init_form' (did you mean 'init_from'?)"),
    ("outptu=x", "run.yaml: unknown section or key 'outptu' (did you mean 'output'?)"),
    ("lr=1", "run.yaml: unknown section or key 'lr' (did you mean 'train.lr'?)"),
    ("train.steps=5.5", "run.yaml: train.steps=5.5: Input should be a valid integer…"),
    ("train.steps='5'", "run.yaml: train.steps='5': Input should be a valid integer…"),
    ("train.clip=1", "run.yaml: train.clip=1: Input should be a valid boolean…"),
    ("train.lr=fast", "run.yaml: train.lr='fast': Input should be a valid number…"),
    ("train.lr=" + "x" * 60_000, "run.yaml: train.lr='xxx…"),
    ("target=5", "run.yaml: target=5: Input should be a valid string…"),
    ("train.lr=.inf", "run.yaml: train.lr…"),
    ("train.lr=.nan", "run.yaml: train.lr…"),
    ("train.betas=[0.5]", "run.yaml: train.betas…"),
    ("train=5", "run.yaml: train=5: expected a section, with keys such as train.lr…"),
    ("target.lr=5", "run.yaml: target={'lr': 5}: Input should be a valid string…"),
    ("train.lr=-1", "run.yaml: train.lr: -1.0 is not positive; leave it out for the default…"),
    ("train.lr", NO_FORM),
    ("=5", NO_FORM),
    *(
        (word, NO_FORM)
        for word in ("train[lr]=5", "train..lr=5", ".lr=5", "train.=5", "train .lr=5", " train.lr=5")
    ),
    ("[0]=1", NO_FORM),
    *((word, WHITE) for word in ("train.lr=\n5", "train.lr= 5", "train.lr=5\n", "train.lr=5 ")),
    *(
        (f"draft.init_from={text}", "draft.init_from= is empty; leave the word out, or write null")
        for text in ("", " ")
    ),
    ("train.betas=[1,", "override 'train.betas=[1,': the value is not YAML: …"),
    ("train.lr=" + "[" * 500, DEEP),
    ("train.lr=" + "[" * 50_000, "…is nested…"),  # the parser's own limit may come first (libyaml 0.2.6)
    ("train.lr=" + "{a: " * 10_000, DEEP),
    ("a" + ".a" * 5_000 + "=1", DEEP),
    ("train.lr=" + "x" * 100_000, "…has 100009 characters, expected at most 65536…"),
    ("train.lr=!!int x", "…the value is not YAML: invalid literal…"),
    ("train.lr=!!bool x", "…the value is not YAML: KeyError: 'x'…"),
    *(
        (f"{key}={LONG_NUMBER}", "…is not YAML: Exceeds the limit (4300 digits)…")
        for key in ("train.steps", "draft")
    ),
    ("train.lr=\udcff", "…is not Unicode…"),
    (r'output="a\0b"', "…holds the character NUL…"),
]
"""A word, and the line that refuses it."""


@pytest.mark.parametrize(("word", "expected"), WRONG_WORDS, ids=lambda text: repr(text)[:40])
def test_a_wrong_word_is_one_line_that_names_it(tmp_path, word, expected):
    line = refusal(tmp_path, None, "target=t", word)
    assert is_like(line, expected)
    assert len(line) < 1_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: target is required, such as target=VALUE"),
        ("tarrget: t", "run.yaml: unknown section or key 'tarrget' (did you mean 'target'?)"),
        ("target: [1,\n", NO_FILE),
        ("target: a\ntarget: b\n", NO_FILE),
        ("- a\n- b\n", "config file FILE holds no mapping of sections…"),
        ("target: t\ntrain:\n  lr: [1\nsteps: 2\n", "…line 3…"),
        ("a: &a [*a]\n", "…is not YAML: Circular reference detected…"),
        ("a: {b: 1, c: 2, b: 3}\n", "…is not YAML: found duplicate key b…"),
        ("? [1, 2]\n: 3\n", "…found unhashable key…"),
        ("a: 1\n---\nb: 2\n", "…expected a single document…"),
        ('a: !!python/object/apply:os.system ["x"]\n', "…could not determine a constructor…"),
        ('target: "a\\0b"\n', "…holds the character NUL…"),
        ("a: " + "[" * 500, DEEP),
        ("a: " + "[" * 20_000, "…is nested…"),
        ("".join("  " * level + "a:\n" for level in range(100)), DEEP),
        ("target: " + "x" * (1 << 20), "…bytes, expected at most 1048576…"),
        ("train: {lr: !!int x}", "…is not YAML: invalid literal…"),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path, text, expected):
    assert is_like(refusal(tmp_path, text), expected.replace("FILE", str(tmp_path / "run.yaml")))


def test_nothing_in_a_value_is_replaced(tmp_path):
    assert resolve(tmp_path, "target: t\n", "output=runs/${target}").output == Path("runs/${target}")


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


@pytest.mark.timeout(20)
def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml is not a regular file"):
        read_configuration(tmp_path / "run.yaml", {}, [])


def test_a_resolved_configuration_is_read_as_it_stands(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(Run(target="${oc.env:HOME} ${train.lr}", train=Train(lr=1e-7))))
    values = read_resolved(file)
    assert values["target"] == "${oc.env:HOME} ${train.lr}"
    assert validate(Run, values, "config.yaml").train.lr == 1e-7


def test_a_later_layer_adds_to_mappings_and_replaces_anything_else(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("a: {b: [1, 2], c: {d: 1}}\ne: null\n")
    words = ["a.b=[3]", "a.c.f=2", "e.g=4", "a.c={h: 5}", "i=1", "i=null"]
    assert read_configuration(file, {}, words) == {
        "a": {"b": [3], "c": {"d": 1, "f": 2, "h": 5}},
        "e": {"g": 4},
        "i": None,
    }
