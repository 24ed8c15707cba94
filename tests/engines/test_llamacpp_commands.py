"""Commands with the real llama.cpp: what it is asked in this project's processes, and as a server of its own."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_kit.targets import read_target
from spec_testing import draw_draft
from spec_trainer.cli.app import run

from ..free_port import free_port
from ..gguf_targets import write_target_gguf
from .llamacpp_drafts import DRAFTS, SHAPE
from .page_server import ServerProcess

pytest.importorskip("xllamacpp")
pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("llamacpp"), pytest.mark.timeout(120)]

EXACT = ["engine.attention=f32", "engine.draft_type=f32"]
NEW_TOKENS = 24
PROGRAM = f"{sys.executable} {Path(__file__).with_name('llama_server.py')}"


@pytest.fixture(scope="module")
def target(make_target, tmp_path_factory) -> Path:
    """A Qwen3, whose draft below has three guesses in ten accepted; its GGUF file is beside its weights."""
    folder = tmp_path_factory.mktemp("target")
    for file in make_target("qwen3", **SHAPE).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    write_target_gguf(folder, folder / "target.gguf")
    return folder


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    return draw_draft(tmp_path_factory.mktemp("drawn") / "draft", read_target(target), 2, **DRAFTS["eagle3"])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"input_ids": [3 + n, 5, 7 + n, 9, 4], "loss_mask": [0, 0, 0, 0, 1]} for n in range(8)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.fixture
def evaluated(draft, target, prompts, capfd):
    """``evaluated(engine, *words)``: the document of ``evaluate`` in an engine."""

    def evaluate(engine: str, *words: str) -> dict:
        flags = ["--engine", engine, "--target", target, "--draft-model", draft, "--prompts", prompts]
        flags += ["--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--no-untrained"]
        assert run(["evaluate", *map(str, flags), "--json", *words]) == 0
        return json.loads(capfd.readouterr().out)

    return evaluate


def test_evaluate_measures_what_the_reference_measures(evaluated):
    ours, theirs = evaluated("hf"), evaluated("llamacpp", *EXACT)
    assert theirs["outputs_equal"]
    for key in ("rounds", "drafted", "generated_tokens"):
        assert theirs[key] == pytest.approx(ours[key], rel=0.03)
    assert theirs["acceptance_length"] == pytest.approx(ours["acceptance_length"], rel=0.03)
    assert theirs["acceptance_length"] > 1


@pytest.fixture
def servers(draft, target, tmp_path, capfd) -> Iterator[tuple[str, str]]:
    """The addresses of a server that was started by the printed command, and of one without a draft."""
    words = [
        "--draft-model",
        draft,
        "--target",
        target,
        "--output",
        tmp_path / "draft.gguf",
        "--format",
        "gguf",
    ]
    assert run(["convert", *map(str, words), "engine.draft_type=f32"]) == 0
    printed = capfd.readouterr().out.splitlines()[-1].strip()
    assert shlex.split(printed)[0] == "llama-server"
    started = []
    try:
        commands = {"drafting": printed, "plain": f"llama-server -m {target / 'target.gguf'} --metrics"}
        for name, command in commands.items():
            port = free_port()
            (tmp_path / name).mkdir()
            command = command.replace("llama-server", PROGRAM, 1)
            started.append(ServerProcess(f"{command} --port {port}", tmp_path / name, port))
        for server in started:
            server.wait_ready(60.0)
        yield started[0].url, started[1].url
    finally:
        for server in started:
            server.close()


def test_a_server_started_by_the_printed_command_is_measured(servers, evaluated, prompts, capfd):
    drafting, plain = servers
    words = ["--server", drafting, "--baseline-server", plain, "--prompts", str(prompts)]
    assert run(["evaluate", *words, "--max-new-tokens", str(NEW_TOKENS), "--concurrency", "1", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["engine"], document["baseline_engine"]) == ("llamacpp", "llamacpp")
    assert document["outputs_equal"], document["first_differences"]
    ours = evaluated("hf")
    assert document["acceptance_length"] == pytest.approx(ours["acceptance_length"], rel=0.03)
    assert document["generated_tokens"] == ours["generated_tokens"]
    assert len(document["acceptance_per_position"]) == len(ours["acceptance_per_position"])


def test_regenerate_writes_the_targets_answers(target, prompts, tmp_path):
    answers = {}
    for engine, options in (("hf", []), ("llamacpp", ["engine.attention=f32"])):
        output = tmp_path / f"{engine}.jsonl"
        words = ["--engine", engine, "--target", target, "--data", prompts, "--output", output]
        words += ["--max-new-tokens", NEW_TOKENS, "--temperature", 0]
        assert run(["regenerate", *map(str, words), *options]) == 0
        answers[engine] = [json.loads(line)["input_ids"] for line in output.read_text().splitlines()]
    assert answers["hf"] == answers["llamacpp"]


def asked(target: Path, prompts: Path, output: Path, gguf: Path) -> list[str]:
    words = ["--engine", "llamacpp", "--target", target, "--data", prompts, "--output", output]
    return ["regenerate", *map(str, words), "--max-new-tokens", str(NEW_TOKENS), f"engine.gguf={gguf}"]


def test_another_targets_file_is_refused_before_it_answers(target, make_target, prompts, tmp_path, capfd):
    other = write_target_gguf(make_target("llama", **SHAPE), tmp_path / "other.gguf")
    assert run(asked(target, prompts, tmp_path / "rows.jsonl", other)) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert line.endswith(f"has architecture llama, target {target} has qwen3; convert this folder to GGUF")


def test_a_target_that_llamacpp_cannot_load_ends_in_one_line(target, prompts, tmp_path, capfd):
    """The weights that the plugin compares are whole; a tensor that llama.cpp needs is missing."""
    damaged = tmp_path / "damaged.gguf"
    content = (target / "target.gguf").read_bytes()
    damaged.write_bytes(content.replace(b"blk.3.attn_q.weight", b"blk.3.attn_x.weight"))
    assert run(asked(target, prompts, tmp_path / "rows.jsonl", damaged)) == 1
    errors = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("spec-trainer: error: ")
    ]
    assert len(errors) == 1
    assert re.search("llama.cpp did not start: .*tensor 'blk.3.attn_q.weight' not found$", errors[0])
