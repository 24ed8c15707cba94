"""References between keys of a configuration: other keys and nothing else, and no growth without end."""

from __future__ import annotations

import pytest

from spec_core.errors import ConfigError
from spec_trainer.configuration import read_configuration
from spec_trainer.configuration.references import resolve_references


def test_a_reference_is_the_other_keys_value_whatever_its_type(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("a: {b: 3, c: [1, x]}\nd: ${a.b}\ne: ${a}\nf: n-${a.b}-${g}\ng: ${d}\n")
    assert read_configuration(file, {}, ["h=${a.c}"]) == {
        "a": {"b": 3, "c": [1, "x"]},
        "d": 3,
        "e": {"b": 3, "c": [1, "x"]},
        "f": "n-3-3",
        "g": 3,
        "h": [1, "x"],
    }


def test_a_backslash_keeps_the_text():
    assert resolve_references({"a": r"\${b}"}) == {"a": "${b}"}


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:HOME}",
        "${oc.decode:x}",
        "x${oc.deprecated:a}",
        "${${a}}",
        "${a",
        "${}",
        "${a.}",
        "${.a}",
        "${a b}",
    ],
)
@pytest.mark.parametrize("layer", ["file", "flag", "word"])
def test_anything_but_a_key_is_refused(tmp_path, monkeypatch, value, layer):
    monkeypatch.setenv("HOME", "secret")
    file = tmp_path / "run.yaml"
    file.write_text(f"a: 1\nt: '{value}'\n" if layer == "file" else "a: 1\n")
    flags = {"t": value} if layer == "flag" else {}
    words = [f"t={value}"] if layer == "word" else []
    with pytest.raises(
        ConfigError, match=r"does not read the environment: .* such as target=\$NAME"
    ) as caught:
        read_configuration(file, flags, words)
    assert "secret" not in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "values",
    [
        {"v0": "x" * 50, **{f"v{n}": f"${{v{n - 1}}}${{v{n - 1}}}" for n in range(1, 40)}},
        {"v0": [1], **{f"v{n}": [f"${{v{n - 1}}}"] * 2 for n in range(1, 40)}},
    ],
)
def test_growth_is_bounded(values):
    with pytest.raises(ConfigError, match=r"more than"):
        resolve_references(values)


def test_a_circle_and_a_missing_key_are_named():
    with pytest.raises(ConfigError, match=r"refers to itself \(b -> a -> b\)"):
        resolve_references({"a": "${b}", "b": "${a}"})
    with pytest.raises(ConfigError, match=r"\$\{a\.x\}: there is no key of that name"):
        resolve_references({"a": {"b": 1}, "c": "${a.x}"})
