"""Files of rows that are cut, packed too much, or in another encoding."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from spec_core.errors import DataError
from spec_trainer.data.errors import BadRow
from spec_trainer.data.sources import read_rows

ROW = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "name": "a [list], \"quoted\" and 'é'"}


def contents(file):
    return [row.content for row in read_rows(str(file))]


def problem(file):
    with pytest.raises(DataError) as refused:
        contents(file)
    return str(refused.value)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("wrap", [list, lambda rows: {"data": rows}])
def test_a_cut_list_says_after_how_many_whole_rows(tmp_path, wrap, indent):
    file, text = tmp_path / "rows.json", json.dumps(wrap([ROW] * 3), indent=indent, ensure_ascii=False)
    first = text.index("{", text.index("["))
    ends = [index + 1 for index in range(first, len(text)) if text[index] == "}"][:3]
    for cut in range(first + 1, ends[-1]):
        file.write_text(text[:cut], "utf-8")
        whole = sum(end <= cut for end in ends)
        said = problem(file)
        if "not JSON: Invalid" not in said and "Expecting" not in said:
            rows = f"{whole} whole row{'' if whole == 1 else 's'}"
            assert f"the file is cut: it ends in the middle of row {whole + 1}, after {rows}; copy" in said
        else:  # within an escape or a word of a literal
            assert text[cut - 1] == "\\" or text[:cut].rstrip()[-1].isalpha()


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_cut_last_line_is_called_cut_and_a_damaged_one_is_not(tmp_path, name):
    text = json.dumps(ROW, ensure_ascii=False)
    (tmp_path / name).write_text(f"{text}\n{text[:-9]}", "utf-8")
    whole, cut = contents(tmp_path / name)
    assert whole == ROW
    assert (
        str(cut) == "not JSON: the file is cut: it ends in the middle of this row; copy or download it again"
    )


def test_a_damaged_line_is_not_called_cut(tmp_path):
    text, file = json.dumps(ROW), tmp_path / "rows.jsonl"
    file.write_text(f'{text[:-1]}\n{{"a": "x\n{text[:-1]}x')
    unended, unterminated, last = map(str, contents(file))
    assert "not JSON: Expecting ',' delimiter at column" in unended
    assert "not JSON: Invalid control character at column 9; a .jsonl file" in unterminated
    assert "not JSON: Expecting ',' delimiter at column" in last


@pytest.mark.parametrize("text", ['[{"a": 1},\n oops]', '[{"a": 1}] tail', '[{"a": 1} {"a": 2}]', "nonsense"])
def test_a_damaged_list_is_not_called_cut(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    assert "not JSON: " in problem(tmp_path / "rows.json")


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize(
    ("encoding", "advice"),
    [
        ("latin-1", "iconv -f LATIN1 -t UTF-8 if it is in Latin-1"),
        ("utf-16", "iconv -f UTF-16 -t UTF-8"),
        ("utf-16-le", "it is in UTF-16LE; save the file as UTF-8, such as by iconv -f UTF-16LE -t UTF-8"),
        ("utf-16-be", "iconv -f UTF-16BE -t UTF-8"),
        ("utf-32", "iconv -f UTF-32 -t UTF-8"),
        ("utf-32-le", "iconv -f UTF-32LE -t UTF-8"),
    ],
)
def test_text_that_is_not_utf_8_gets_fitting_advice(tmp_path, name, encoding, advice):
    file = tmp_path / name
    file.write_bytes(json.dumps(ROW, ensure_ascii=False).encode(encoding))
    if name == "rows.json":
        assert problem(file).endswith(advice)
    else:
        (bad,) = contents(file)
        assert isinstance(bad, BadRow)
        assert str(bad).endswith(advice)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROW),
        json.dumps(ROW, indent=1),
        f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n",
        f"{{bad}}\n{json.dumps(ROW)}\n",
    ],
    ids=["one row", "one row on several lines", "lines", "a bad line first"],
)
def test_a_json_file_with_a_row_in_each_line_is_read(tmp_path, text):
    (tmp_path / "rows.json").write_text(text, "utf-8")
    assert contents(tmp_path / "rows.json")[-1] == ROW


@pytest.mark.parametrize(
    "filling", [b"\n", b'{"text": "%s"}\n' % (b"a" * 2000), b" "], ids=["empty lines", "rows", "a line"]
)
def test_a_packed_file_may_not_hold_very_many_times_its_size(tmp_path, filling):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(filling * ((80 << 20) // len(filling)), 9))
    assert file.stat().st_size < 1 << 20
    with pytest.raises(
        DataError, match=r"more than 100 times as many|has more than 16777216 bytes|1048576 lines are empty"
    ):
        sum(1 for _ in read_rows(str(file)))


def test_a_packed_file_of_few_bytes_may_be_packed_well(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write((json.dumps(ROW) + "\n") * 20_000)
    assert (tmp_path / "rows.jsonl.gz").stat().st_size * 200 < 20_000 * 70
    assert len(contents(tmp_path / "rows.jsonl.gz")) == 20_000


def test_a_parquet_row_may_not_take_gigabytes(tmp_path):
    file = tmp_path / "rows.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array(["x" * (1 << 20)]))
    row = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    parquet.write_table(pa.table({"texts": row}), file, compression="zstd")
    assert file.stat().st_size < 2_000
    said = problem(file)
    assert said == (
        f"{file}:1: 32 rows from this one on take more than 1024 MiB of memory; cut them into several"
    )


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_parquet_file_may_not_hold_many_times_its_size(tmp_path, as_dictionary):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 9_000, pa.int32()), pa.array(["x" * (1 << 20)]))
    if not as_dictionary:
        texts = texts[:80].dictionary_decode()
    parquet.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet", compression="zstd")
    rows = read_rows(str(tmp_path / "rows.parquet"))
    for _ in range(32):
        next(rows)
    with pytest.raises(
        DataError, match=r"rows.parquet:33: up to this row, the file holds more than 100 times"
    ):
        next(rows)


def test_a_parquet_file_has_a_byte_for_each_row_beyond_a_million(tmp_path):
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": pa.nulls(2_000_000, pa.string())}), file)
    assert f"it has 2000000 rows in {file.stat().st_size} bytes" in problem(file)


def test_parquet_rows_of_several_groups_and_batches_come_in_order(tmp_path):
    table = pa.table({"text": [str(number) for number in range(150)]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=50)
    rows = list(read_rows(str(tmp_path / "rows.parquet")))
    assert [row.content["text"] for row in rows] == [str(number) for number in range(150)]
    assert rows[-1].where.endswith("rows.parquet:150")
