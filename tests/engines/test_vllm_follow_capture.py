"""``follow`` captures with a vLLM of its own: the draft learns what it learns from features of ``hf``."""

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_trainer.cli.app import run

from ..integration import draft_server, launching, live_server, run_directory
from .conftest import VLLM_ARGS
from .vllm_here import lives, needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

NUM_REQUESTS = 96
START_S = 540.0
"""A run starts a vLLM, and other tests use the machine meanwhile."""
VLLM = [
    "engine.name=vllm",
    "engine.kv_cache_bytes=67108864",
    *(f"engine.args.{key}={json.dumps(value)}" for key, value in VLLM_ARGS.items()),
]


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_a_vllm_captures_what_hf_does_and_a_killed_command_leaves_none(
    spawning, repeating, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, draft_server.TOKEN)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')
    words = [f"target={repeating}", "draft.num_steps=3", "draft.layers=[1,2]", "data.eval_samples=0"]
    (tmp_path / "row.jsonl").write_text('{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}\n')
    fresh = [f"data.path={tmp_path / 'row.jsonl'}", f"output={tmp_path / 'fresh'}", "train.steps=1"]
    assert run(["train", *words, *fresh, "train.lr=1e-9"]) == 0
    draft = tmp_path / "fresh" / "draft"
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 97) for _ in range(6)] for _ in range(NUM_REQUESTS)]
    words += ["train.lr=5e-3", "train.warmup_steps=5", "train.global_batch_tokens=96"]
    words += [f"follow.every={NUM_REQUESTS // 2}", "follow.held_out=0.3", "follow.poll_s=0.1"]

    def follow(url: str, output: Path, *keys: str) -> list[str]:
        return [
            "follow",
            *words,
            *keys,
            "--draft-model",
            str(draft),
            "--server",
            url,
            "--output",
            str(output),
        ]

    reference, output, log = tmp_path / "hf", tmp_path / "vllm", tmp_path / "log"
    with draft_server.serving(repeating, draft, live_server.__file__, 0) as url:
        live_server.ask(url, prompts)
        assert run(follow(url, reference, f"follow.requests={NUM_REQUESTS}")) == 0
    with draft_server.serving(repeating, draft, live_server.__file__, 0) as url:
        answers = live_server.ask(url, prompts)["answers"]
        with log.open("wb") as errors:
            command = [*launching.program(), *follow(url, output, *VLLM)]
            process = subprocess.Popen(command, stdout=errors, stderr=errors)
        try:
            until(lambda: run_directory.versions(output), process, log)
            members = psutil.Process(process.pid).children(recursive=True)
            assert any("EngineCore" in " ".join(one.cmdline()) for one in members)
        finally:
            process.kill()  # as kill -9 does
            process.wait()
        psutil.wait_procs(members, 60)
        assert not [one for one in members if lives(one)]
        again = live_server.ask(url, prompts)
        assert (again["answers"], set(again["versions"])) == (
            answers,
            {run_directory.versions(output)[0]["version"]},
        )

    (expected,), (found,) = run_directory.versions(reference), run_directory.versions(output)
    for name in ("step", "served", "version", "requests", "held_out", "parent"):
        assert found[name] == expected[name]
    assert found["served"] == found["step"] > 0
    for name in ("acceptance_length", "acceptance_length_served", "acceptance_length_start"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2)
    losses = [[row["loss"] for row in run_directory.metrics(one)] for one in (output, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    needle = ", ".join(map(str, prompts[0]))
    files = [log, *(file for file in output.rglob("*") if file.is_file())]
    assert not [file for file in files if needle.encode() in file.read_bytes()]
