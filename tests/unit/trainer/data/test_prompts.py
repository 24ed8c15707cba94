"""Prompts: what of a row the target is to answer."""

import json

import pytest

from spec_core.errors import DataError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.prompts import load_prompts, serving_prompts

from ....chat_templates import THINKING


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
    with pytest.raises(
        DataError,
        match=r"prompts\.jsonl:1: a prompt of 3 tokens; 1 to 2 are possible: leave .* or lower --max-new",
    ):
        load_prompts(file, tmp_path, 10, 2)


def test_a_malformed_row_is_named(tmp_path):
    file = _write(tmp_path, {"input_ids": [1], "loss_mask": [0]}, {"nothing": 1})
    with pytest.raises(DataError, match=r"prompts\.jsonl:2"):
        load_prompts(file, tmp_path, 10, 2)


def test_a_measured_run_asks_held_out_questions_as_an_engine_is_asked(tmp_path, tokenizer_folder, write):
    """The conversation itself has an empty thought there, which the template writes and no engine is given."""
    folder = tokenizer_folder(THINKING)
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(3)
    ]
    config = DataConfig(path=write(*rows), eval_samples=2)
    dataset = load_dataset(config, folder, 400, with_questions=True)
    lines = [int(sample.where.rpartition(":")[2]) for sample in dataset.held_out]
    file = _write(tmp_path, *(rows[line - 1] for line in lines))
    assert serving_prompts(dataset, 50, 2) == load_prompts(file, folder, 400, 50)
    assert serving_prompts(dataset, 50, 1) == load_prompts(file, folder, 400, 50)[:1]
    assert serving_prompts(dataset, 5, 2) == []
