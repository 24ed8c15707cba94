"""Features captured once, interrupted at any moment, then trained from: the losses of the run with an engine."""

import json
import random
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spec_trainer.cli.app import run

from .launching import started, until
from .run_directory import losses, metrics

SAMPLES, HELD_OUT = 120, 12
TOKENS = (9, 16)
"""Fewest and most of a sample."""
ONE_PASS_EACH = "engine.batch_tokens=16"
"""Two samples never fit one forward pass of the target, so that rounding cannot depend on a sample's neighbours."""


@dataclass(frozen=True)
class Offline:
    """Words of commands on one target and one data set."""

    target: Path
    rows: Path

    def capture(self, folder: Path, *words: str) -> list[str]:
        return ["capture", *self._inputs, "--output", str(folder), "capture.shard_bytes=40000", *words]

    def train(self, output: Path, *words: str) -> list[str]:
        keys = ["train.global_batch_tokens=100", "train.lr=3e-3", "train.warmup_steps=2", "draft.num_steps=2"]
        return ["train", *self._inputs, "--output", str(output), *keys, "train.eval_every=5", *words]

    @property
    def _inputs(self) -> list[str]:
        return ["--target", str(self.target), "--data", str(self.rows)]


@pytest.fixture(scope="module")
def offline(peaked_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Offline:
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w") as out:
        for number in range(SAMPLES):
            first, length = draw.randrange(97), draw.randint(*TOKENS)
            ids = [number // 97, number % 97, *((first + position) % 97 for position in range(length - 2))]
            out.write(json.dumps({"input_ids": ids, "loss_mask": [0, 0] + [1] * (length - 2)}) + "\n")
    return Offline(peaked_target, file)


@pytest.fixture(scope="module")
def online(offline: Offline, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of a run whose features come from an engine."""
    output = tmp_path_factory.mktemp("online") / "run"
    assert_done(offline.train(output, ONE_PASS_EACH))
    return metrics(output)


@pytest.fixture(scope="module")
def captured(offline: Offline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of an undisturbed capture. Do not change them: others look at them."""
    folder = tmp_path_factory.mktemp("captured") / "features"
    assert_done(offline.capture(folder, ONE_PASS_EACH))
    return folder


@pytest.fixture(scope="module")
def interrupted(offline: Offline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed with -9 at two moments, then gone on with. Do not change it: others look at it."""
    folder = tmp_path_factory.mktemp("interrupted") / "features"
    moments = random.Random(5)
    for _ in range(2):
        done, at_least = _shards(folder), moments.randint(1, 5)
        with started(offline.capture(folder, ONE_PASS_EACH)) as child:
            until(lambda done=done, more=at_least: len(_shards(folder)) >= len(done) + more)
            child.send_signal(signal.SIGKILL)
        retained = _shards(folder)
        assert retained.keys() > done.keys()
        assert retained.items() >= done.items(), "a complete shard was captured again"
    assert_done(offline.capture(folder, ONE_PASS_EACH))
    assert _shards(folder).items() >= retained.items()
    assert {path.name for path in folder.iterdir()} == {".lock", "index.json", *_shards(folder)}
    return folder


@pytest.mark.slow
def test_samples_captured_with_interruptions_give_the_losses_of_the_online_run(
    offline, online, interrupted, tmp_path
) -> None:
    """Bit for bit, held-out losses too."""
    assert_done(offline.train(tmp_path / "run", f"data.features={interrupted}"))
    records = metrics(tmp_path / "run")
    assert len(records) == len(online) > 10
    names = {"loss", "grad_norm", "eval_loss", "eval_acceptance_length"}
    for one, other in zip(records, online, strict=True):
        assert {name: one[name] for name in names & one.keys()} == {
            name: other[name] for name in names & other.keys()
        }
    assert any("eval_loss" in record for record in records)
    assert sum(record["samples"] for record in records) == SAMPLES - HELD_OUT


@pytest.mark.slow
def test_interrupted_captures_make_the_folder_of_an_undisturbed_one(captured, interrupted) -> None:
    assert _contents(interrupted) == _contents(captured)
    assert (interrupted / "index.json").read_text() == (captured / "index.json").read_text()


@pytest.mark.slow
def test_engines_of_their_own_capture_the_same(offline, captured, tmp_path) -> None:
    """Two replicas and a writer, interrupted by Ctrl-C."""
    folder = tmp_path / "features"
    words = offline.capture(folder, ONE_PASS_EACH, "placement.kind=disaggregated", "engine.replicas=2")
    with started(words) as child:
        until(lambda: len(_shards(folder)) >= 3)
        child.send_signal(signal.SIGINT)
        child.wait(60)
        assert child.returncode == 130, child.stderr.read()
        assert re.search(r"shards left: \d+ of \d+; the same command goes on there", child.stderr.read())
    assert 3 <= len(_shards(folder)) < len(_shards(captured))
    assert_done(words)
    assert _contents(folder) == _contents(captured)
    assert {log.name for log in (folder / "logs").iterdir()} == {
        "engine-0.log",
        "engine-1.log",
        "writer-0.log",
    }


def test_batches_of_the_target_show_in_the_rounding_only(offline, online, tmp_path) -> None:
    assert_done(offline.capture(tmp_path / "features"))
    assert_done(offline.train(tmp_path / "run", f"data.features={tmp_path / 'features'}"))
    assert losses(tmp_path / "run") == pytest.approx([record["loss"] for record in online], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_read_what_one_reads(offline, online, captured, tmp_path) -> None:
    """The launcher starts them and no engine."""
    output = tmp_path / "run"
    assert_done(offline.train(output, f"data.features={captured}", "train.ranks=2"))
    assert losses(output) == pytest.approx([record["loss"] for record in online], rel=1e-5)
    logs = {log.name for log in (output / "logs").glob("*.log")}
    assert logs == {"trainer-0.log", "trainer-1.log"}


@pytest.mark.slow
def test_a_run_may_go_on_without_its_engine(offline, online, captured, tmp_path) -> None:
    """An engine for some steps, the folder for the others, stopped in between."""
    output = tmp_path / "run"
    with started(offline.train(output, ONE_PASS_EACH)) as child:
        until(lambda: (output / "metrics.jsonl").exists() and len(losses(output)) >= 2)
        child.send_signal(signal.SIGINT)
        child.wait(60)
    assert 2 <= len(losses(output)) < len(online)
    assert_done(offline.train(output, f"data.features={captured}"))
    assert losses(output) == [record["loss"] for record in online]


def test_a_flipped_byte_is_found_named_and_mended(command_line, offline, online, captured, tmp_path) -> None:
    folder = shutil.copytree(captured, tmp_path / "features")
    file = folder / "features-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
    train = offline.train(tmp_path / "run", f"data.features={folder}")
    outcome = command_line(*train)
    error = outcome.err.splitlines()[-1].removeprefix("spec-trainer: error: ")
    assert outcome.code == 1
    assert error.startswith(f"{file}: the features of sample ")
    assert error.endswith(
        f"are damaged (their checksum differs); delete {file} and run the capture again, which captures that shard "
        "only"
    )
    trained = losses(tmp_path / "run")
    assert trained == [record["loss"] for record in online][: len(trained)]
    verified = command_line("capture", "--verify", folder)
    assert verified.code == 1
    assert verified.err.strip().endswith(error)
    file.unlink()
    assert "features-00003.safetensors is missing; run the capture again" in command_line(*train).error
    document = json.loads(command_line(*offline.capture(folder, ONE_PASS_EACH), "--json").out)
    assert (document["captured_shards"], document["shards"]) == (1, len(_shards(captured)))
    assert document["samples"] == SAMPLES
    assert _contents(folder) == _contents(captured)
    assert_done(["capture", "--verify", str(folder)])
    assert_done(train)
    assert losses(tmp_path / "run") == [record["loss"] for record in online]


def test_bad_usage_is_one_line_and_makes_nothing(command_line, offline, captured, tmp_path) -> None:
    """``unit/trainer/offline/test_store.py`` has what is refused of a run from a folder."""
    inputs = ["--target", offline.target, "--data", offline.rows]
    assert command_line("capture", *inputs).error == "capture needs --output: the folder to write features to"
    assert "is neither a command" in command_line("capture", "that").error
    line = command_line(*offline.capture(captured, "draft.layers=[1]")).error
    assert "layers [2, 4, 5, 8] there, [1, 8] here" in line
    line = command_line(*offline.capture(tmp_path / "new", "engine.batch_tokens=8")).error
    assert "engine.batch_tokens=8 is smaller than sample" in line
    assert list(tmp_path.iterdir()) == []


def assert_done(words: list[str]) -> None:
    """Runs a command in this process, to a good end."""
    assert run(words) == 0


def _shards(folder: Path) -> dict[str, int]:
    """Complete ones: name -> when it was written."""
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("features-*.safetensors")}


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
