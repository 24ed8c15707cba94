"""Row shapes to samples, and what the report says about the rest; ``test_sources.py`` has files."""

import shutil

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from spec_core.errors import DataError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset

from .conftest import CHAT, SHARED, TOKENS, VOCAB, byte_level, numbers, read


def test_openai_and_sharegpt_rows_give_the_same_samples(load):
    parts = [{"type": "text", "text": "The fox"}, {"type": "text", "text": ""}]
    in_parts = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": parts}]}
    swapped = {"conversations": CHAT["messages"]}
    samples = load(CHAT, SHARED, in_parts, swapped).train
    for sample in samples[1:]:
        np.testing.assert_array_equal(sample.input_ids, samples[0].input_ids)
        np.testing.assert_array_equal(sample.loss_mask, samples[0].loss_mask)


def test_a_system_turn_and_a_tool_turn_of_sharegpt_are_not_supervised(load, supervised):
    turns = [("system", "Be brief"), ("human", "Time?"), ("observation", "noon"), ("gpt", "Noon.")]
    row = {"conversations": [{"from": who, "value": what} for who, what in turns]}
    assert supervised(load(row).sample(0)) == "Noon.<|im_end|>"


def test_all_of_a_plain_text_is_supervised(load, supervised):
    sample = load({"text": "The quick brown fox"}).sample(0)
    assert sample.loss_mask.all()
    assert supervised(sample) == "The quick brown fox"


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "<s> <|start|> $A", "$A </s>", "$A"])
@pytest.mark.parametrize(
    "text", ["The fox", "<s>The fox", "The fox</s>", "<s><|start|>The fox</s>", "<s>", ""]
)
def test_a_text_has_the_tokenizers_special_tokens_once(tokenizer_folder, write, template, text):
    def build():
        tokenizer = byte_level()
        tokenizer.add_special_tokens(["<s>", "</s>", "<|start|>"])
        ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>", "<|start|>")]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
        return tokenizer

    folder = tokenizer_folder(build=build)
    dataset = read(write({"text": text}, {"text": "The fox"}), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before, after = template.replace(" ", "").split("$A")
    expected = text if text.startswith(before) else before + text
    expected = expected if expected.endswith(after) else expected + after
    row = next((sample for sample in dataset.train if sample.where.endswith(":1")), None)
    learnt = "" if row is None else tokenizer.decode(row.input_ids)
    assert learnt == (expected if len(tokenizer.tokenize(expected)) > 1 else "")


def test_tokenised_rows_are_taken_as_they_are_and_need_no_tokenizer(write):
    sample = read(write(TOKENS)).sample(0)
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == (
        [5, 6, 7, 8, 9],
        [False, True, False, True, True],
    )


def test_last_turn_only_keeps_the_last_stretch_of_a_tokenised_row(write):
    own = TOKENS | {"last_turn_only": False}
    none = TOKENS | {"loss_mask": [0] * 5}
    dataset = read(write(TOKENS, own, none), last_turn_only=True)
    assert [sample.loss_mask.astype(int).tolist() for sample in dataset.train] == [
        [0, 0, 0, 1, 1],
        [0, 1, 0, 1, 1],
        [0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'no': json}", "not JSON"),
        ("[1, 2]", "not an object"),
        ({"prompt": "x"}, "unknown shape: expected messages, .* got prompt"),
        ({}, "unknown shape"),
        ({"messages": []}, "messages is not a list of at least one"),
        ({"messages": ["Hi"]}, r"messages\[0\] is not an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\] has the role 'wizard'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, r"content of messages\[0\]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "part of type 'image'; drafts are trained on text",
        ),
        ({"conversations": [{"from": "human", "value": "a"}, {"value": "b"}]}, r"conversations\[1\]"),
        (CHAT | {"images": ["a.png"]}, "the row has 'images'; drafts are trained on text"),
        (TOKENS | {"images": ["a.png"]}, "the row has 'images'; drafts are trained on text"),
        (CHAT | {"tools": "clock"}, "tools is not a list"),
        (CHAT | {"last_turn_only": "yes"}, "last_turn_only: expected true or false"),
        ({"text": 5}, "text is int"),
        ({"text": "bad \ud800 half"}, "not Unicode"),
        ({"input_ids": [1, 2]}, "without loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids but 1 value of"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "other values than 0 and 1"),
        ({"input_ids": [1.5, 2], "loss_mask": [1, 1]}, "input_ids is not a list of integers"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [1, 1]}, "input_ids is not a list of integers"),
        ({"input_ids": [True, 2, "3"], "loss_mask": [1, 1]}, "input_ids is not a list of integers"),
        ({"input_ids": [5, True], "loss_mask": [True, False]}, "bad tokens: input_ids holds true or false"),
        (f'{{"input_ids": [{"9" * 5_000}]}}', r"not JSON: Exceeds the limit \(4300 digits\)"),
        ({"input_ids": [1, VOCAB], "loss_mask": [1, 1]}, f"token outside the vocabulary: id {VOCAB}"),
        ({"input_ids": [1, -1], "loss_mask": [1, 1]}, "token outside the vocabulary: id -1"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line_or_skipped(load, row, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*{message}") as caught:
        load(TOKENS, "", row, TOKENS)
    assert "\n" not in str(caught.value)
    report = load(TOKENS, "", row, TOKENS, on_bad_row="skip").report
    assert report.kept == 2
    (tally,) = report.dropped.values()
    assert tally.count == 1
    assert "rows.jsonl:3" in tally.first


def test_the_report_counts_by_reason_and_shows_the_first_of_each(load):
    short = {"input_ids": [1], "loss_mask": [1]}
    bad = [{"x": 1}, {"messages": []}, {"y": 2}]
    report = load(
        TOKENS, *bad, short, TOKENS | {"loss_mask": [0] * 5}, on_bad_row="skip", max_length=4
    ).report
    assert {reason: tally.count for reason, tally in report.dropped.items()} == {
        "unknown shape": 2,
        "bad conversation": 1,
        "fewer than 2 tokens": 1,
    }
    assert report.truncated.count == 2
    assert (report.kept, report.tokens, report.supervised_tokens) == (2, 8, 2)
    assert report.unsupervised.first.endswith("rows.jsonl:6")
    text = str(report)
    assert "kept samples: 2" in text
    assert "unknown shape: 2 (first: " in text
    assert "\n" not in text


def test_a_row_that_is_merely_too_short_is_dropped_and_never_an_error(write):
    dataset = read(write(TOKENS, {"input_ids": [], "loss_mask": []}))
    assert dataset.report.dropped["fewer than 2 tokens"].first.endswith("rows.jsonl:2: fewer than 2 tokens")


def test_long_samples_are_cut_on_the_right_with_their_masks(load, supervised):
    whole = load(CHAT).sample(0)
    cut = load(CHAT, max_length=len(whole) - 2)
    np.testing.assert_array_equal(cut.sample(0).input_ids, whole.input_ids[:-2])
    np.testing.assert_array_equal(cut.sample(0).loss_mask, whole.loss_mask[:-2])
    assert cut.report.truncated.count == 1


def test_data_without_a_usable_row_or_a_supervised_token_is_refused(write):
    with pytest.raises(DataError, match="holds no row at all"):
        read(write())
    with pytest.raises(DataError, match=r"no usable row .*unknown shape: 1 \(first: .*rows\.jsonl:1"):
        read(write({"x": 1}), on_bad_row="skip")
    with pytest.raises(DataError, match="holds no supervised token"):
        read(write(TOKENS | {"loss_mask": [0] * 5}))


def test_sample_ids_are_indices_over_train_and_held_out(write):
    dataset = read(write(*numbers(30)), eval_samples=4)
    assert [sample.sample_id for sample in dataset.samples] == list(range(30))
    assert dataset.sample(29) is dataset.held_out[-1]
    assert dataset.lengths == dict.fromkeys(range(30), 4)
    assert dataset.total_tokens == 26 * 4


def test_token_counts_are_of_supervised_training_tokens(write):
    rows = [
        {"input_ids": [3, 3, 4, 5], "loss_mask": [0, 1, 1, 0]},
        {"input_ids": [4, 4], "loss_mask": [1, 1]},
    ]
    counts = read(write(*rows)).token_counts(VOCAB)
    assert counts.dtype == np.int64
    assert counts.shape == (VOCAB,)
    assert {i: int(n) for i, n in enumerate(counts) if n} == {3: 1, 4: 3}


def test_the_digest_changes_with_ids_masks_order_and_split_only(write):
    rows = numbers(12)
    base = read(write(*rows)).digest
    other_id = [rows[0] | {"input_ids": [10, 20, 399, 0]}, *rows[1:]]
    other_mask = [rows[0] | {"loss_mask": [1, 1, 1, 0]}, *rows[1:]]
    assert read(write(*rows, name="elsewhere.jsonl")).digest == base
    for changed in (other_id, other_mask, rows[::-1], rows[1:]):
        assert read(write(*changed)).digest != base
    assert read(write(*rows), eval_samples=2).digest != base
    assert read(write(*rows), max_length=3).digest != base


@pytest.mark.timeout(20)
def test_a_text_that_is_too_long_to_encode_is_a_malformed_row(load):
    text = "a" * (2**22 + 1)
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]}
    for row in ({"text": text}, chat):
        with pytest.raises(
            DataError, match=r"text too long: 41943\d\d characters, expected at most 4194304; cut"
        ):
            load(row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "r" * 10**6, "content": "x"}]},
        {"k" * 10**6: 1},
        {f"key {number}": 1 for number in range(20_000)},
        {"text": "x", "last_turn_only": "y" * 10**6},
    ],
    ids=["role", "key", "keys", "flag"],
)
def test_messages_about_rows_are_short(write, row):
    with pytest.raises(DataError) as caught:
        read(write(row))
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"model": 5}', '{"model": {"type": "BPE", "vocab": 1, "merges": 2}}']
)
def test_a_missing_or_damaged_tokenizer_is_one_line(tokenizer_folder, write, content):
    folder = tokenizer_folder()
    if content is None:
        shutil.rmtree(folder)
    else:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"the tokenizer in '.*' cannot be read: ") as caught:
        read(write({"text": "hi"}), folder)
    assert "\n" not in str(caught.value)


def test_prompts_are_cut_in_texts_and_dropped_where_they_are_too_long_elsewhere(tokenizer_folder, write):
    rows = [
        {"text": "one two three four"},
        {"messages": [{"role": "user", "content": "one two three four five six seven"}]},
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]},
    ]
    config = DataConfig(path=str(write(*rows)), eval_samples=0)
    dataset = load_dataset(config, tokenizer_folder(), VOCAB, longest_prompt=3)
    text, tokens = dataset.samples
    assert text.prompt.tolist() == text.input_ids[:3].tolist()
    assert tokens.prompt.tolist() == [5, 6, 7]
    assert dataset.report.dropped["prompt too long"].count == 1


def test_prompts_need_no_answers(write):
    rows = [{"input_ids": [5, 6, 6], "loss_mask": [0, 0, 0]}, {"input_ids": [7, 8], "loss_mask": [0, 0]}]
    config = DataConfig(path=str(write(*rows)), eval_samples=1)
    dataset = load_dataset(config, "nowhere", 10, longest_prompt=9)
    (sample,) = dataset.train
    assert sample.prompt.tolist() == sample.input_ids.tolist()
    assert dataset.token_counts(10).sum() == len(sample)
