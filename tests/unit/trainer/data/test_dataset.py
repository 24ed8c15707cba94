"""Files and row shapes to samples, and what the report says about the rest."""

import gzip
import json
import os
import random
import shutil
import sys

import numpy as np
import pytest
from datasets import Dataset as Table
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from spec_core.errors import ArtifactError, DataError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.sources import read_rows

from ....chat_templates import READS_PARTS
from .conftest import byte_level

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The fox"}]}
SHARED = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "The fox"}]}
TOKENS = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]}
VOCAB = 400


def read(path, folder="nowhere", **settings):
    return load_dataset(DataConfig(path=str(path), **({"eval_samples": 0} | settings)), folder, VOCAB)


def numbers(count, start=0):
    return [{"input_ids": [10, 20, start + i, i % 7], "loss_mask": [0, 1, 1, i % 2]} for i in range(count)]


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


@pytest.mark.parametrize(
    "wrap", [lambda rows: rows, lambda rows: {"about": {"n": [1]}, "data": rows, "end": 1}]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_lists_name_the_number_of_a_bad_row(tmp_path, wrap, indent):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(wrap([TOKENS, {"bad": True}, TOKENS]), indent=indent), "utf-8")
    with pytest.raises(DataError, match=r"rows\.json:2: unknown shape"):
        read(file)
    assert len(read(file, on_bad_row="skip").train) == 2


def test_a_json_file_may_have_a_row_in_each_line(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in (TOKENS, {"bad": True}, TOKENS)), "utf-8")
    with pytest.raises(DataError, match=r"rows\.json:2: unknown shape"):
        read(file)
    assert len(read(file, on_bad_row="skip").train) == 2


def test_descriptions_of_a_data_set_hold_no_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(TOKENS))
    for name in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"):
        (tmp_path / name).write_text('{"splits": ["train"]}')
    assert len(read(tmp_path).train) == 1


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"input_ids": [1, 2], "loss_mask": [1, 1]},\n oops]', r"\.json:2: "),
        ('[{"input_ids": [1, 2], "loss_mask": [1, 1]}\n', r"\.json: the file is cut"),
        ('[{"input_ids": [1, 2], "loss_mask": [1, 1]}] tail', r"\.json:1: not JSON: Extra data"),
        ('{"rows": []}', r"\.json:1: unknown shape: .*got rows"),
        ('{"data": 3}', r"\.json:1: unknown shape: .*got data"),
        ('"text"', r"\.json: expected a list of rows"),
        ("", r"\.json:1: "),
        ("[" * 100_000, r"s\.json' cannot be read: .*nested too deeply"),
        (f"[{'9' * 5_000}]", r"s\.json' cannot be read: .*Exceeds the limit \(4300 digits\)"),
    ],
)
def test_a_json_file_that_is_no_list_of_rows_is_refused(tmp_path, text, where):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=where):
        read(tmp_path / "rows.json", on_bad_row="skip")


def test_parquet_gives_the_samples_of_the_same_json_lines(tmp_path, write, tokenizer_folder):
    rows = [CHAT, SHARED, TOKENS, {"text": "The quick brown fox"}]
    Table.from_list(
        [
            {key: row.get(key) for key in ("messages", "conversations", "input_ids", "loss_mask", "text")}
            for row in rows
        ]
    ).to_parquet(tmp_path / "rows.parquet")
    folder = tokenizer_folder()
    from_parquet, from_lines = read(tmp_path / "rows.parquet", folder), read(write(*rows), folder)
    assert from_parquet.digest == from_lines.digest
    assert from_parquet.sample(3).where.endswith("rows.parquet:4")


def test_fields_that_parquet_fills_in_do_not_reach_the_template(tmp_path, write, tokenizer_folder):
    def tool(**properties):
        return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}

    def call(**arguments):
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    user = {"role": "user", "content": "a"}
    rows = [
        {"messages": [user, call(x=1)], "tools": [tool(x={"type": "integer"})]},
        {"messages": [user, call(y="b")], "tools": [tool(y={"type": "string", "enum": ["b"]})]},
    ]
    Table.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    folder = tokenizer_folder(READS_PARTS)
    assert read(tmp_path / "rows.parquet", folder).digest == read(write(*rows), folder).digest


def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(tmp_path):
    Table.from_list([TOKENS, TOKENS | {"loss_mask": [1]}]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet:2: bad tokens"):
        read(tmp_path / "rows.parquet")


@pytest.mark.parametrize("damage", [lambda content: b"no table", lambda content: content[:-20]])
def test_a_damaged_parquet_file_is_refused_in_one_line(tmp_path, damage):
    file = tmp_path / "rows.parquet"
    Table.from_list([{"text": "x"}]).to_parquet(file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"rows\.parquet' cannot be read: ") as caught:
        read(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("content", "suffix"),
    [(gzip.compress(b"{}\n", mtime=0), ".jsonl.gz"), (b"PAR1 and more PAR1", ".parquet")],
)
def test_a_file_of_another_kind_than_its_name_says_is_refused(tmp_path, name, content, suffix):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}' has the content of a {suffix} file; give it that suffix$"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_files_are_utf_8_with_or_without_a_byte_order_mark(tmp_path, tokenizer_folder, name):
    row = json.dumps({"text": "Füchse 狐"}, ensure_ascii=False)
    text, folder, digests = f"[{row}]" if name.endswith(".json") else row, tokenizer_folder(), set()
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(text, encoding)
        digests.add(read(tmp_path / name, folder).digest)
    assert len(digests) == 1
    (tmp_path / name).write_text(text, "utf-16")
    with pytest.raises(DataError, match=rf"{name}.*not UTF-8: .*save the file as UTF-8"):
        read(tmp_path / name, folder)


def test_a_folder_is_read_file_by_file_in_the_order_of_names(write, tmp_path):
    for name, ids in (("b/2.jsonl", [3, 3]), ("a.jsonl", [1, 1]), ("b/1.jsonl", [2, 2])):
        write({"input_ids": ids, "loss_mask": [1, 1]}, name=f"folder/{name}")
    for name in ("README.md", "._a.jsonl", ".checkpoints/a.jsonl"):
        file = tmp_path / "folder" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\0 not data")
    assert [int(sample.input_ids[0]) for sample in read(tmp_path / "folder").train] == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("missing.jsonl", r"does not exist: expected a \.jsonl, \.json, \.parquet file"),
        ("folder/missing.parquet", "does not exist: expected"),
        ("/no/such/folder", "does not exist: expected"),
        ("notes.txt", "no known kind"),
        (".", "holds no"),
    ],
)
def test_a_path_without_data_is_refused_with_what_is_expected(tmp_path, monkeypatch, path, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=problem):
        read(path)


def test_a_hub_id_that_cannot_be_reached_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="data 'owner/name:test' cannot be read") as caught:
        read("owner/name:test")
    assert "\n" not in str(caught.value)


def test_without_the_package_of_the_hub_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"^data 'owner/name:test' is on the hub, .*'spec-trainer\[hub\]'$"):
        read("owner/name:test")


def test_data_without_a_usable_row_or_a_supervised_token_is_refused(write):
    with pytest.raises(DataError, match="holds no row at all"):
        read(write())
    with pytest.raises(DataError, match=r"no usable row .*unknown shape: 1 \(first: .*rows\.jsonl:1"):
        read(write({"x": 1}), on_bad_row="skip")
    with pytest.raises(DataError, match="holds no supervised token"):
        read(write(TOKENS | {"loss_mask": [0] * 5}))


def test_held_out_samples_are_the_same_ones_in_any_order_of_rows(write):
    rows = numbers(40)
    shuffled = random.Random(1).sample(rows, len(rows))
    first = read(write(*rows), eval_samples=5)
    second = read(write(*shuffled), eval_samples=5)
    contents = [sorted(tuple(s.input_ids.tolist()) for s in data.held_out) for data in (first, second)]
    assert contents[0] == contents[1]
    assert len(first.held_out) == 5
    assert len(first.train) == 35
    assert first.report.held_out == 5


def test_repeats_of_a_held_out_row_are_not_trained_on(write):
    rows = numbers(20)
    dataset = read(write(*rows, *rows), eval_samples=3)
    held_out = {tuple(sample.input_ids.tolist()) for sample in dataset.held_out}
    assert len(held_out) == 3
    assert held_out.isdisjoint(tuple(sample.input_ids.tolist()) for sample in dataset.train)
    assert dataset.report.dropped["repeats a held-out row"].count == 3


def test_by_default_a_tenth_but_at_most_64_samples_are_held_out(write):
    assert len(read(write(*numbers(50)), eval_samples=None).held_out) == 5
    assert len(read(write(*numbers(9)), eval_samples=None).held_out) == 0
    many = [{"input_ids": [i % 300, i // 300], "loss_mask": [1, 1]} for i in range(700)]
    assert len(read(write(*many), eval_samples=None).held_out) == 64


def test_holding_out_everything_is_refused(write):
    with pytest.raises(DataError, match="eval_samples=3 leaves nothing of 3 samples"):
        read(write(*numbers(3)), eval_samples=3)
    with pytest.raises(DataError, match="leaves nothing to train on"):
        read(write(TOKENS, TOKENS, TOKENS), eval_samples=1)


def test_an_eval_path_is_held_out_as_a_whole(write):
    path, eval_path = write(*numbers(4)), write(*numbers(3, start=50), name="eval.jsonl")
    dataset = read(path, eval_path=eval_path, eval_samples=None)
    assert (len(dataset.train), len(dataset.held_out)) == (4, 3)
    assert dataset.held_out[0].where.endswith("eval.jsonl:1")


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


# --- bounds, odd files and odd rows ---------------------------------------------------------------------------------


@pytest.mark.timeout(20)
def test_a_text_that_is_too_long_to_encode_is_a_malformed_row(load):
    text = "a" * (2**22 + 1)
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]}
    for row in ({"text": text}, chat):
        with pytest.raises(
            DataError, match=r"text too long: 41943\d\d characters, expected at most 4194304; cut"
        ):
            load(row)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_pipe_or_a_device_is_no_data(tmp_path, name):
    pipe, device = tmp_path / "pipe" / name, tmp_path / "device" / name
    for file in (pipe, device):
        file.parent.mkdir()
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for file in (pipe, device):
        with pytest.raises(DataError, match=rf"{name} is not a regular file"):
            read(file)


def test_a_line_and_a_file_beyond_their_bounds_are_refused(tmp_path):
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    for file, size in ((lines, 17 << 20), (array, 4 << 30)):
        with file.open("wb") as stream:
            stream.truncate(size)
    with pytest.raises(DataError, match=r"a\.jsonl:1: the line has more than 16777216 bytes"):
        read(lines)
    with pytest.raises(DataError, match=r"a\.json has 4294967296 bytes, expected at most 1073741824"):
        read(array)


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


@pytest.mark.parametrize("name", ["a[1].parquet", "x::y.parquet", "s3:a?b*.parquet", "a b.parquet"])
def test_a_parquet_file_may_have_any_name_and_leaves_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file, plain = tmp_path / name, tmp_path / "plain.parquet"
    Table.from_list(
        [{"input_ids": [1, n // 300, n % 300], "loss_mask": [1, 1, 1]} for n in range(600)]
    ).to_parquet(plain)
    plain.rename(file)
    before = set(tmp_path.iterdir())
    dataset = read(file)
    ids = [sample.input_ids.tolist() for sample in dataset.train]
    assert ids == [[1, n // 300, n % 300] for n in range(600)]
    assert set(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_looked_into_is_not_called_empty(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=r"cannot be read: Permission denied"):
        list(read_rows(str(tmp_path)))


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


def test_what_regenerate_says_of_its_answers_is_no_data(write, tmp_path):
    write(*numbers(2), name="answers/a.jsonl")
    meta = tmp_path / "answers/a.jsonl.meta.json"
    for text in ('{"settings": {}, "result": {}}', '{"of": "another program"}'):
        meta.write_text(text)
        assert len(read(tmp_path / "answers").train) == 2
    meta.write_text('{"settings": {"chat_template_kwargs": 1}}')
    with pytest.raises(ArtifactError, match=r"a\.jsonl\.meta\.json is damaged: chat_template_kwargs"):
        read(tmp_path / "answers")
