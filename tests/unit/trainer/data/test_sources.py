"""Files, folders and hub ids that rows come from."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from datasets import Dataset as Table

from spec_core.errors import ArtifactError, DataError
from spec_trainer.data.sources import check_apart, read_rows

from ....chat_templates import READS_PARTS
from .conftest import CHAT, SHARED, TOKENS, numbers, read


@pytest.mark.parametrize(
    "written",
    [
        json.dumps,
        lambda rows: json.dumps({"about": {"n": [1]}, "data": rows, "end": 1}, indent=2),
        lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    ],
    ids=["list", "data", "lines"],
)
def test_a_json_file_names_the_number_of_a_bad_row(tmp_path, written):
    file = tmp_path / "rows.json"
    file.write_text(written([TOKENS, {"bad": True}, TOKENS]), "utf-8")
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


def test_a_folder_is_read_file_by_file_in_the_order_of_names(write, tmp_path):
    for name, ids in (("b/2.jsonl", [3, 3]), ("a.jsonl", [1, 1]), ("b/1.jsonl", [2, 2])):
        write({"input_ids": ids, "loss_mask": [1, 1]}, name=f"folder/{name}")
    for name in ("README.md", "._a.jsonl", ".checkpoints/a.jsonl"):
        file = tmp_path / "folder" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\0 not data")
    assert [int(sample.input_ids[0]) for sample in read(tmp_path / "folder").train] == [1, 2, 3]


def test_what_a_folder_of_data_would_read_as_data_is_no_output(tmp_path, monkeypatch):
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for output in ("data/answers.jsonl", "data/sub/run", "link/run"):
        for folder in ("data", str(tmp_path / "link"), "."):
            with pytest.raises(DataError, match=f"output {output} is in the data folder '{folder}'"):
                check_apart(folder, Path(output))
    for output in ("answers.jsonl", "database/run", "data/.cache/run", "../run"):
        check_apart("data", Path(output))
    check_apart("owner/name", Path("owner/name"))


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


def test_what_regenerate_says_of_its_answers_is_no_data(write, tmp_path):
    write(*numbers(2), name="answers/a.jsonl")
    meta = tmp_path / "answers/a.jsonl.meta.json"
    for text in ('{"settings": {}, "result": {}}', '{"of": "another program"}'):
        meta.write_text(text)
        assert len(read(tmp_path / "answers").train) == 2
    meta.write_text('{"settings": {"chat_template_kwargs": 1}}')
    with pytest.raises(ArtifactError, match=r"a\.jsonl\.meta\.json is damaged: chat_template_kwargs"):
        read(tmp_path / "answers")
