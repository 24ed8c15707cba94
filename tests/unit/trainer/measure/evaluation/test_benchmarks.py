"""A row of each benchmark, as its data set has it, and the questions that are made of it."""

import gzip
import json

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from spec_core.errors import ConfigError, DataError
from spec_trainer.measure.evaluation.benchmarks import BENCHMARKS, parse_benchmarks, read_benchmarks

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


SUBSETS = ("HumanEval", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation",
           "writing")  # fmt: skip


ROWS = {
    "mt_bench": {"prompt_id": 1, "category": "math", "prompt": ["What is 2+2?", "And {x}?"], "reference": []},
    "gsm8k": {"question": "Tom has 3 hens.", "answer": "3\n#### 3"},
    "math500": {"problem": "Solve $x=1$.", "solution": "$1$", "answer": "1", "subject": "Algebra", "level": 1},
    "aime24": {"id": 60, "problem": "Find $n$.", "solution": "…", "answer": "204", "year": "2024"},
    "aime25": {"problem_idx": 1, "problem": "Find $m$.", "answer": 70, "problem_type": ["Number Theory"]},
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n",
        "test": "", "entry_point": "one",
    },
    "mbpp": {"task_id": 2, "prompt": "Write a function.", "code": "", "test_list": ["assert True"]},
    "mmlu": {"question": "Which is {x}?", "subject": "sets", "choices": ["one", "two"], "answer": 1},
    "alpaca": {"instruction": "Name it.", "input": "a cat", "output": "Tom", "text": "Below is …"},
    "speed_bench": {"question_id": "q", "category": "qa", "turns": ["Who?", "And when?"], "multiturn": True},
    **{f"redhat_{name.lower()}": {"prompt": f"A question of {name}."} for name in SUBSETS},
}  # fmt: skip


QUESTIONS = {
    "mt_bench": ["What is 2+2?", "And {x}?"],
    "gsm8k": ["Tom has 3 hens." + BOXED],
    "math500": ["Solve $x=1$." + BOXED],
    "aime24": ["Find $n$." + BOXED],
    "aime25": ["Find $m$." + BOXED],
    "humaneval": [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef one():\n\n```"
    ],
    "mbpp": ["Write a function."],
    "mmlu": [
        "Which is {x}?\n\nA. one\nB. two\n\n"
        "Please reason step by step, and put the letter of the right choice within \\boxed{}."
    ],
    "alpaca": ["Name it.\n\nInput:\na cat"],
    "speed_bench": ["Who?", "And when?"],
    **{f"redhat_{name.lower()}": [f"A question of {name}."] for name in SUBSETS},
}


def test_every_benchmark_has_a_sample_here():
    assert ROWS.keys() == QUESTIONS.keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_folder_become_questions(tmp_path, name):
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[name]) + "\n")
    (row,) = read_benchmarks({name: None}, tmp_path)
    assert (row.benchmark, row.questions) == (name, QUESTIONS[name])


def test_rows_are_the_first_of_the_hubs_data_set(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((*args, options))
        return [ROWS["gsm8k"]] * 5

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("spec_trainer.data.sources.hub_problem", lambda name, kind: None)
    assert [row.where for row in read_benchmarks({"gsm8k": 2}, None)] == [
        "openai/gsm8k:test:1",
        "openai/gsm8k:test:2",
    ]
    assert asked == [("openai/gsm8k", "main", {"split": "test", "data_files": None})]


@pytest.mark.parametrize("name", ["mt_bench", "humaneval"])
def test_the_turns_of_question_files_are_asked_as_they_stand(tmp_path, name):
    folder = tmp_path / name
    (folder / "reference_answer").mkdir(parents=True)
    (folder / "reference_answer" / "gpt-4.jsonl").write_text(json.dumps({"question_id": 81, "choices": []}))
    (folder / "question.jsonl").write_text(json.dumps({"question_id": 81, "turns": ["a", "b"]}))
    (row,) = read_benchmarks({name: None}, tmp_path)
    assert row.questions == ["a", "b"]


def test_of_a_data_sets_copy_only_the_benchmarks_configuration_and_split_are_read(tmp_path):
    for config in ("main", "socratic"):
        (tmp_path / "gsm8k" / config).mkdir(parents=True)
        for split in ("test", "train"):
            rows = pa.Table.from_pylist([{"question": f"{config} {split}", "answer": "#### 1"}])
            parquet.write_table(rows, tmp_path / "gsm8k" / config / f"{split}-00000-of-00001.parquet")
    (tmp_path / "gsm8k" / "dataset_infos.json").write_text("{}")
    (row,) = read_benchmarks({"gsm8k": None}, tmp_path)
    assert row.questions == ["main test" + BOXED]


def test_a_data_set_of_several_benchmarks_is_read_file_by_file(tmp_path):
    folder = tmp_path / "RedHatAI" / "speculator_benchmarks"
    folder.mkdir(parents=True)
    for name in SUBSETS:
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    wanted = parse_benchmarks("RedHatAI/speculator_benchmarks:5")
    rows = read_benchmarks(wanted, tmp_path)
    assert [(row.benchmark, row.questions) for row in rows] == [(f"redhat_{n.lower()}", [n]) for n in SUBSETS]


def test_masked_texts_of_speed_bench_are_refused(tmp_path):
    """The published file has this in place of texts, which NVIDIA's prepare_data.py writes into ``test.parquet``."""
    (tmp_path / "speed_bench").mkdir()
    file = tmp_path / "speed_bench" / "test.parquet"
    parquet.write_table(pa.Table.from_pylist([ROWS["speed_bench"]]), file)
    (row,) = read_benchmarks({"speed_bench": None}, tmp_path)
    assert row.questions == ["Who?", "And when?"]
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{article}"
    parquet.write_table(pa.Table.from_pylist([{"turns": [masked]}]), file)
    with pytest.raises(
        DataError, match=r"test.parquet:1 is no row of speed_bench .*: its text is masked; fetch"
    ):
        read_benchmarks({"speed_bench": None}, tmp_path)


@pytest.mark.parametrize("file", ["train", "test_socratic"])
def test_of_the_authors_files_only_those_of_the_split_are_read(tmp_path, file):
    (tmp_path / "gsm8k").mkdir()
    for name in ("test", file):
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text(json.dumps({"question": name}))
    (row,) = read_benchmarks({"gsm8k": None}, tmp_path)
    assert row.questions == ["test" + BOXED]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("humaneval", "HumanEval.jsonl.gz"),
        ("math500", "MATH-500.jsonl"),
        ("mbpp", "sanitized-mbpp.jsonl"),
        ("humaneval", "openai_humaneval.jsonl.gz"),
    ],
)
def test_files_may_have_the_authors_names_and_be_compressed(tmp_path, name, file):
    text = json.dumps(ROWS[name]).encode()
    (tmp_path / file).write_bytes(gzip.compress(text) if file.endswith(".gz") else text)
    (row,) = read_benchmarks({name: None}, tmp_path)
    assert row.questions == QUESTIONS[name]


def test_a_damaged_compressed_file_is_refused(tmp_path):
    (tmp_path / "humaneval.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS["humaneval"]).encode())[:-12])
    with pytest.raises(DataError, match=r"humaneval\.jsonl\.gz' cannot be read"):
        read_benchmarks({"humaneval": None}, tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"problem": "x"}', "1 is no row of gsm8k as in openai/gsm8k: it has no 'question'"),
        ('{"question": 3}', "1 is no row of gsm8k as in openai/gsm8k: expected a text, got int"),
        ('{"question": " "}', "1 is no row of gsm8k as in openai/gsm8k: expected a text, got an empty one"),
        (
            '{"turns": "abc"}',
            "1 is no row of gsm8k as in openai/gsm8k: expected a list of texts in 'turns', got str",
        ),
        ('{"turns": null}', "expected a list of texts in 'turns', got NoneType"),
        ('{"turns": ["a", 1]}', "expected a text, got int"),
        ("[]", "1 is no row of gsm8k as in openai/gsm8k: expected texts"),
        ('{"question": ', "1: not JSON"),
        ("", "benchmark gsm8k has no rows in "),
    ],
)
def test_a_row_of_something_else_is_refused(tmp_path, line, problem):
    (tmp_path / "gsm8k.jsonl").write_text(line)
    with pytest.raises(DataError) as caught:
        read_benchmarks({"gsm8k": None}, tmp_path)
    assert problem in str(caught.value)


def test_a_single_text_is_no_list_of_turns(tmp_path):
    (tmp_path / "mt_bench.jsonl").write_text('{"prompt": "What is 2+2?"}')
    with pytest.raises(DataError, match="expected a list of texts in 'prompt', got str"):
        read_benchmarks({"mt_bench": None}, tmp_path)


@pytest.fixture
def hub_cache(tmp_path):
    """A cache of the hub with two revisions of a data set, whose files are links as everywhere in such a cache."""
    data_set = tmp_path / "hub" / "datasets--openai--gsm8k"
    for revision in ("0ld", "curr3nt"):
        blob = data_set / "blobs" / revision
        blob.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist([{"question": revision, "answer": "#### 1"}]), blob)
        for config in ("main", "socratic"):
            folder = data_set / "snapshots" / revision / config
            folder.mkdir(parents=True)
            (folder / "test-00000-of-00001.parquet").symlink_to(blob)
    (data_set / "refs").mkdir()
    (data_set / "refs" / "main").write_text("curr3nt")
    return tmp_path / "hub"


@pytest.mark.parametrize("place", [".", "..", "datasets--openai--gsm8k"])
def test_of_a_cache_of_the_hub_the_current_snapshot_is_read(hub_cache, place):
    (row,) = read_benchmarks({"gsm8k": None}, hub_cache / place)
    assert row.questions == ["curr3nt" + BOXED]


def test_a_snapshot_may_be_named_itself(hub_cache):
    snapshot = hub_cache / "datasets--openai--gsm8k" / "snapshots" / "0ld"
    (row,) = read_benchmarks({"gsm8k": None}, snapshot)
    assert row.questions == ["0ld" + BOXED]
    with pytest.raises(DataError, match="has no mbpp"):
        read_benchmarks({"mbpp": None}, snapshot)


@pytest.mark.parametrize("place", [".", "HuggingFaceH4", "HuggingFaceH4/MATH-500"])
def test_a_downloaded_data_set_is_found_from_each_folder_above(tmp_path, place):
    copy = tmp_path / "HuggingFaceH4" / "MATH-500"
    copy.mkdir(parents=True)
    (copy / "rows.jsonl").write_text(json.dumps(ROWS["math500"]))
    (copy / "dataset_info.json").write_text('{"splits": {}}')
    (row,) = read_benchmarks({"math500": None}, tmp_path / place)
    assert row.questions == QUESTIONS["math500"]


def test_a_folder_without_the_benchmark_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"has no gsm8k: expected gsm8k\.jsonl, gsm8k\.json, gsm8k\.parquet or a folder"
    ):
        read_benchmarks({"gsm8k": None}, tmp_path)


def test_benchmarks_are_named_with_numbers_of_rows():
    assert parse_benchmarks("mt-bench, gsm8k:20") == {"mt_bench": None, "gsm8k": 20}
    assert parse_benchmarks("MATH-500,HumanEval") == {"math500": None, "humaneval": None}
    assert parse_benchmarks("openai/gsm8k:5,aime_2024,AIME2025") == {
        "gsm8k": 5,
        "aime24": None,
        "aime25": None,
    }
    for wrong in (
        "arc",
        "gsm8k:0",
        "gsm8k:",
        "gsm8k:x",
        "gsm8k,gsm8k:3",
        "gsm8k,,mbpp",
        "../gsm8k",
        "/gsm8k",
        "gsm8k/..",
    ):
        with pytest.raises(ConfigError, match="expected some of mt_bench, gsm8k"):
            parse_benchmarks(wrong)


@pytest.mark.parametrize("content", ["../../elsewhere", "", "x" * 2000])
def test_a_cache_of_the_hub_that_names_no_commit_is_refused(hub_cache, content):
    (hub_cache / "datasets--openai--gsm8k" / "refs" / "main").write_text(content)
    with pytest.raises(DataError, match=r"refs/main (names no commit|has 2000 bytes)"):
        read_benchmarks({"gsm8k": None}, hub_cache)


def test_a_folder_of_the_working_directory_is_not_taken_for_the_hub(tmp_path, monkeypatch):
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the working directory has a openai/gsm8k beside the hub's"):
        read_benchmarks({"gsm8k": None}, None)
