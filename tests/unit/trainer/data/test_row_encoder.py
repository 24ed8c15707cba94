"""Rows that several processes render: the same samples, the same report, the same errors."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spec_core.errors import DataError, RunError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.row_encoder import RowEncoder, encode_rows
from spec_trainer.data.sources import read_rows

from ....chat_templates import CHATML, CONVERSATIONS, THINKING
from .conftest import VOCAB

pytestmark = pytest.mark.xdist_group("processes that render rows")  # one server forks them all

SAID = ("Hi", "The quick fox.", "And then?", "Four, I think.")
GOOD = {
    "messages": [
        {"role": role, "content": said} for role, said in zip(("user", "assistant") * 2, SAID, strict=True)
    ]
}
TOKENISED = {"input_ids": [1, 2], "loss_mask": [0, 1]}
"""A row for which no process loads a tokenizer."""
BAD = {"messages": [{"role": "nobody", "content": "x"}]}
ANSWERED = [
    row | {"messages": [*row["messages"], {"role": "assistant", "content": "Four."}]} for row in CONVERSATIONS
]


@pytest.mark.parametrize(
    ("template", "rows"),
    [
        (CHATML, [GOOD, BAD, {"text": "one"}, TOKENISED, "no JSON", GOOD] * 20),
        (THINKING, [*ANSWERED, BAD] * 8),
    ],
    ids=["all shapes", "thinking"],
)
def test_processes_make_the_samples_that_one_makes(load, request, template, rows):
    alone = load(*rows, template=template, on_bad_row="skip", max_length=40)
    request.getfixturevalue("by_processes")
    together = load(*rows, template=template, on_bad_row="skip", max_length=40)
    assert together.digest == alone.digest
    assert str(together.report) == str(alone.report)
    assert [sample.where for sample in together.samples] == [sample.where for sample in alone.samples]


def test_prompts_and_questions_come_from_processes_too(tokenizer_folder, write, request):
    config = DataConfig(path=write(*[GOOD] * 20, *ANSWERED), eval_samples=3)
    settings = {"longest_prompt": 60, "with_questions": True}
    alone = load_dataset(config, tokenizer_folder(THINKING), VOCAB, **settings)
    request.getfixturevalue("by_processes")
    together = load_dataset(config, tokenizer_folder(THINKING), VOCAB, **settings)
    assert [sample.prompt.tolist() for sample in together.samples] == [
        sample.prompt.tolist() for sample in alone.samples
    ]
    assert [question.tolist() for question in together.questions] == [
        question.tolist() for question in alone.questions
    ]


@pytest.mark.usefixtures("by_processes")
def test_the_first_bad_row_ends_the_reading_whichever_process_had_it(tokenizer_folder, write):
    config = DataConfig(path=write(*[GOOD] * 70, BAD, *[GOOD] * 70, "no JSON"))
    with pytest.raises(DataError, match=r"rows\.jsonl:71: bad conversation: .*on_bad_row=skip") as caught:
        load_dataset(config, tokenizer_folder(), VOCAB)
    assert "\n" not in str(caught.value)
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("by_processes")
@pytest.mark.parametrize(("row", "problem"), [(BAD, r":3: bad conversation"), (GOOD, r"cannot be read")])
def test_a_source_that_ends_too_soon_is_told_after_the_rows_before_it(
    tokenizer_folder, tmp_path, row, problem
):
    file = tmp_path / "rows.jsonl.gz"
    lines = [GOOD, GOOD, row, *[GOOD | {"id": os.urandom(500).hex()} for _ in range(100)]]
    whole = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    file.write_bytes(whole[:-500])
    with pytest.raises(DataError, match=problem):
        load_dataset(DataConfig(path=str(file)), tokenizer_folder(), VOCAB)


@pytest.mark.usefixtures("by_processes")
def test_a_missing_template_is_told_by_whichever_process_misses_it(tokenizer_folder, write):
    config = DataConfig(path=write({"text": "a b c"}, *[GOOD] * 3))
    with pytest.raises(DataError, match="has no chat template"):
        load_dataset(config, tokenizer_folder(None), VOCAB)


@pytest.mark.usefixtures("by_processes")
def test_a_process_that_is_killed_ends_the_reading_in_one_line(tokenizer_folder, write):
    rows = encode_rows(encoder(tokenizer_folder(), write(*[GOOD] * 2000)), read_rows(write(*[GOOD] * 2000)))
    next(rows), next(rows)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RunError, match="one of 2 processes that render the data was killed"):
        list(rows)
    assert multiprocessing.active_children() == []


KILLED = """
import os, sys
from pathlib import Path
from spec_trainer.data import row_encoder
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.sources import read_rows
if __name__ == "__main__":
    row_encoder.ALONE_S = -1
    os.sched_getaffinity = lambda _: {0, 1}
    encoder = row_encoder.RowEncoder(
        config=DataConfig(path=sys.argv[2]), tokenizer_folder=Path(sys.argv[1]), vocab_size=400,
        longest_prompt=None, with_questions=False,
    )
    rows = row_encoder.encode_rows(encoder, read_rows(sys.argv[2]))
    next(rows), next(rows)
    print("rendering", flush=True)
    for row in rows:
        pass
    sys.stdin.read()
"""


def test_processes_end_with_the_one_that_is_killed(write, tmp_path):
    script = tmp_path / "reads.py"
    script.write_text(KILLED)
    reader = subprocess.Popen(
        [sys.executable, script, tmp_path, write(*[TOKENISED] * 20000)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout.readline() == "rendering\n"
        theirs = psutil.Process(reader.pid).children(recursive=True)
        assert len(theirs) >= 2
        reader.kill()
    deadline = time.monotonic() + 60
    while any(process.is_running() and process.status() != "zombie" for process in theirs):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def encoder(folder, path) -> RowEncoder:
    return RowEncoder(
        config=DataConfig(path=str(path)),
        tokenizer_folder=Path(folder),
        vocab_size=VOCAB,
        longest_prompt=None,
        with_questions=False,
    )
