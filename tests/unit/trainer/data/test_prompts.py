"""Prompts: what of a row the target is to answer."""

from __future__ import annotations

import json

import pytest

from spec_core.errors import DataError
from spec_trainer.data.prompts import load_prompts


def _write(tmp_path, *rows):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_tokens_before_the_last_supervised_run_are_the_prompt(tmp_path):
    file = _write(tmp_path, {"input_ids": [5, 1, 2, 3, 4], "loss_mask": [1, 0, 0, 1, 1]})
    assert load_prompts(file, tmp_path, 10, 100) == [[5, 1, 2]]


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 1, 1]])
def test_tokens_without_a_beginning_of_an_answer_are_all_prompt(tmp_path, mask):
    file = _write(tmp_path, {"input_ids": [5, 1, 2], "loss_mask": mask})
    assert load_prompts(file, tmp_path, 10, 100) == [[5, 1, 2]]


def test_a_prompt_that_does_not_fit_is_named(tmp_path):
    file = _write(tmp_path, {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]})
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: a prompt of 3 tokens; 1 to 2 are possible"):
        load_prompts(file, tmp_path, 10, 2)


def test_a_malformed_row_is_named(tmp_path):
    file = _write(tmp_path, {"input_ids": [1], "loss_mask": [0]}, {"nothing": 1})
    with pytest.raises(DataError, match=r"prompts\.jsonl:2"):
        load_prompts(file, tmp_path, 10, 2)
