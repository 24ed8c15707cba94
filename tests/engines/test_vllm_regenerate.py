"""``regenerate`` with vLLM: the reference engine's answers, whatever the number at once, and after a kill."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_trainer.cli.app import run

from ..byte_chats import byte_chat_target, chat_rows
from ..integration.launching import started, until
from .conftest import VLLM_ARGS
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.timeout(900)]

ROWS = 60
START_S = 400.0


@pytest.fixture
def words(
    vllm_environment: None, make_target: Callable[..., Path], tmp_path: Path
) -> Callable[..., list[str]]:
    target = byte_chat_target(make_target, hidden_size=64, head_dim=32)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(ROWS)))
    engine = ["--engine", "vllm", "engine.dtype=float32", f"engine.kv_cache_bytes={64 << 20}"]
    engine += [f"engine.args.{key}={json.dumps(value)}" for key, value in VLLM_ARGS.items()]

    def build(output: Path, *more: str, own: bool = True) -> list[str]:
        inputs = ["--target", target, "--data", data, "--output", output]
        fixed = ["--max-new-tokens", 40, "--temperature", 0]
        return [str(word) for word in ("regenerate", *inputs, *fixed, *(engine if own else ()), *more)]

    return build


def test_killed_in_the_middle_it_goes_on_to_the_answers_of_the_reference_engine(words, tmp_path) -> None:
    reference, output = tmp_path / "hf.jsonl", tmp_path / "vllm.jsonl"
    assert run(words(reference, own=False)) == 0
    few = words(output, "engine.args.max_num_seqs=4")
    with started(few) as child:
        until(lambda: output.exists() and output.read_text().count("\n") > 9, START_S)
        child.send_signal(signal.SIGKILL)
    written = output.read_text().splitlines()
    assert 9 < len(written) < ROWS
    assert run(few) == 0
    assert output.read_text() == reference.read_text()
    assert set(written) <= {*output.read_text().splitlines()}
    many = tmp_path / "many.jsonl"
    assert run(words(many)) == 0
    assert many.read_text() == reference.read_text()
