"""Whole training runs whose engine is vLLM, seen from outside."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..integration import launching, run_directory
from ..integration.launching import Lab, Run
from ..integration.leftovers import assert_nothing_left, belongings
from ..integration.run_directory import losses
from .conftest import VLLM_ARGS
from .vllm_here import lives, needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

STEPS = 40
VLLM = {
    "engine__name": "vllm",
    "engine__batch_tokens": 64,
    "engine__kv_cache_bytes": 64 << 20,
    "timeouts__peer_s": 300,  # other vLLMs take the cores from a rank that waits for its first samples
    **{f"engine__args__{key}": value for key, value in VLLM_ARGS.items()},
}
DECODING = {
    "decode__every": STEPS // 2, "decode__prompts": 8, "decode__max_new_tokens": 30,
    "decode__temperature": 0, "decode__num_draft_tokens": 3, "train__push_every": STEPS // 2,
    "train__lr": 8e-3, "train__global_batch_tokens": 256,
}  # fmt: skip
START_S = 540.0
"""A run starts two vLLMs, and other tests use the machine meanwhile."""


@pytest.fixture(scope="module")
def lab(spawning: None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    keys = {
        "target": llama,
        "data.path": launching.write_rows(folder / "rows.jsonl"),
        "train.steps": STEPS,
        "train.schedule": "constant",
        "train.lr": 3e-3,
        "train.warmup_steps": 5,
        "train.global_batch_tokens": 96,
        "draft.num_steps": 3,
    }
    with Lab(folder, keys, "") as lab:
        yield lab


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("on_policy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_does_what_one_with_the_reference_engine_does(lab, on_policy) -> None:
    output = assert_runs_as_the_reference(lab, START_S, decode__on_policy=on_policy, **VLLM)
    assert lengths(output)[-1] > lengths(output)[0] + 0.5
    assert all(cycle["prefill_s"] > 0 for cycle in cycles(output)[:-1])
    engine, decoder = ((output / "logs" / name).read_text() for name in ("engine-0.log", "decoder-0.log"))
    assert "EngineCore" in engine
    assert (engine.count("vLLM is up"), decoder.count("vLLM is up")) == (1, 1)
    assert decoder.count("was pushed in") == 2


def assert_runs_as_the_reference(lab: Lab, limit_s: float, **keys: object) -> Path:
    """Train with an engine and with ``hf``; return the output of the first.

    A run decodes, and pushes to the engine that does; another captures. Both stay from the first cycle to the last.
    On policy, the losses are equal only if both engines say of each token at which depth it was guessed.
    Held out is what it trains on: a target of random weights says nothing that could be learned elsewhere.
    """
    number = len(list(lab.folder.glob("engine-*")))
    output, reference = lab.folder / f"engine-{number}", lab.folder / f"hf-{number}"
    few = lab.folder / "few.jsonl"
    few.write_text("".join((lab.folder / "rows.jsonl").read_text().splitlines(keepends=True)[1:9]))
    data = {"data__path": few, "data__eval_path": few, **DECODING}
    lab.train(output, timeout_s=limit_s, **data, **keys)
    lab.train_here(reference, **data, decode__on_policy=keys["decode__on_policy"])
    assert len(losses(output)) == STEPS
    assert losses(output) == pytest.approx(losses(reference), rel=1e-3)
    assert [cycle["draft_version"] for cycle in cycles(output)] == [0, STEPS // 2, STEPS]
    assert lengths(output) == pytest.approx(lengths(reference), abs=0.1)
    return output


def cycles(output: Path) -> list[dict]:
    return run_directory.summary(output)["cycles"]


def lengths(output: Path) -> list[float]:
    return [cycle["held_out_acceptance_length"] for cycle in cycles(output)]


def vllm_processes(run: Run) -> list[psutil.Process]:
    """vLLM writes its processes' names over their environment, where the rest of a run is found by."""
    return run.member("engine-0").children(recursive=True)


def engine_core(run: Run) -> psutil.Process:
    (core,) = (process for process in vllm_processes(run) if "EngineCore" in " ".join(process.cmdline()))
    return core


@pytest.mark.slow
def test_a_killed_vllm_is_replaced_and_then_ends_the_run(lab, tmp_path) -> None:
    """First vLLM's process is killed, which counts once; then the engine itself, for which no replacement is left."""
    run = lab.start(tmp_path / "run", train__steps=100_000, engine__replacements=1, **VLLM)
    run.until(lambda: "every process is ready" in run.errors.read_text(), START_S)
    run.train_on()
    before = vllm_processes(run)
    engine_core(run).send_signal(signal.SIGKILL)
    run.until(lambda: run.errors.read_text().count("engine-0 is ready") == 2, START_S)
    run.train_on(20)  # more than the window holds
    (line,) = (run.output / "logs" / "replacements.jsonl").read_text().splitlines()
    cause = json.loads(line)["cause"]
    assert "engine-0: EngineError: vLLM's process EngineCore was killed by signal 9" in cause
    held, started = belongings(run), before + vllm_processes(run)
    run.member("engine-0").send_signal(signal.SIGKILL)
    assert run.wait(60) == 1
    assert "engine-0 was killed by signal 9" in run.last_line()
    assert "engine.replacements=1 allows no other replacement" in run.last_line()
    assert_nothing_left(run, held)
    assert not [process for process in psutil.wait_procs(started, timeout=5)[1] if lives(process)]
