"""Aliases, merged mappings and dates of YAML are read as they stand, or refused."""

import itertools

import pytest

from spec_core.errors import ConfigError
from spec_trainer.configuration import read_configuration, read_resolved


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


def test_a_mapping_takes_keys_of_another_that_it_does_not_have_itself(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("x: {a: &a {<<: {k: 0, l: 0}, k: 1}}\nb: {<<: *a, l: 2}\n")
    assert read_configuration(file, {}, []) == {"x": {"a": {"k": 1, "l": 0}}, "b": {"k": 1, "l": 2}}


def test_a_date_is_a_text():
    assert read_configuration(None, {}, ["a=2026-01-31", "b=[1e5, 1.5E3, -1e-3]"]) == {
        "a": "2026-01-31",
        "b": [1e5, 1.5e3, -1e-3],
    }
