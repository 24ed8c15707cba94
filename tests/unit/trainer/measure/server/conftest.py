"""Fixtures of the tests of ``evaluate --server``."""

import json

import pytest

from spec_trainer.cli.app import run


@pytest.fixture
def bench(tmp_path):
    """A folder of benchmarks: five rows of one question, two of two questions."""
    rows = [{"question": f"How many hens {'h' * n}?", "answer": "#### 3"} for n in range(5)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [{"prompt": ["Who is it?", "Why so?"]}, {"prompt": ["What is it?", "Since when?"]}]
    (tmp_path / "mt_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    return tmp_path


@pytest.fixture
def evaluate(capfd, monkeypatch):
    """``evaluate(words)``: exit code, standard output, and the last line of standard error."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*words: object) -> tuple[int, str, str]:
        code = run(["evaluate", *map(str, words)])
        out, err = capfd.readouterr()
        return code, out, (err.strip().splitlines() or [""])[-1]

    return call
