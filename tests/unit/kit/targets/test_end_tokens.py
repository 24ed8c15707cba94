"""The end tokens of a target are those at which servers stop: the configuration's and the tokenizer's."""

import json
import shutil

import pytest

from spec_kit.targets import read_target


@pytest.fixture
def target(tiny_llama, tmp_path):
    """Return a function: files to write -> the end tokens of the target, whose config.json says 2."""

    def with_files(**files):
        folder = shutil.copytree(tiny_llama, tmp_path / "target")
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return read_target(folder).eos_token_ids

    return with_files


WORDS = {
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 2}},
    "added_tokens": [{"id": 7, "content": "<|im_end|>"}],
}


@pytest.mark.parametrize("end", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_end_of_the_tokenizer_joins_that_of_the_configuration(target, end):
    assert target(tokenizer=WORDS, tokenizer_config={"eos_token": end}) == (2, 7)


def test_end_of_the_tokenizer_joins_those_of_the_generation_config(target):
    files = {"generation_config": {"eos_token_id": [3, 5]}, "tokenizer_config": {"eos_token": "<|im_end|>"}}
    assert target(tokenizer=WORDS, **files) == (3, 5, 7)


def test_end_that_all_files_name_counts_once(target):
    assert target(tokenizer=WORDS, tokenizer_config={"eos_token": "</s>"}) == (2,)


@pytest.mark.parametrize("end", [None, "unheard of", 7])
def test_tokenizer_without_a_known_end_adds_none(target, end):
    assert target(tokenizer=WORDS, tokenizer_config={"eos_token": end}) == (2,)


def test_end_beyond_the_vocabulary_can_not_be_generated_and_is_left_out(target):
    tokens = {**WORDS, "added_tokens": [{"id": 97, "content": "<|im_end|>"}]}
    assert target(tokenizer=tokens, tokenizer_config={"eos_token": "<|im_end|>"}) == (2,)
