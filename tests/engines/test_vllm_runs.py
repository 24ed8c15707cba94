"""Whole training runs whose engine is vLLM, seen from outside."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from ..integration import launching
from ..integration.launching import Lab, losses
from ..integration.leftovers import assert_nothing_left, belongings
from .conftest import VLLM_ARGS
from .vllm_here import lives, needs_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ..integration.launching import Run

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

STEPS = 40
VLLM = {
    "engine__name": "vllm",
    "engine__batch_tokens": 64,
    "engine__kv_cache_bytes": 64 << 20,
    **{f"engine__args__{key}": value for key, value in VLLM_ARGS.items()},
}
START_S = 240.0


@pytest.fixture(scope="module")
def lab(vllm_environment: None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
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


def test_a_run_has_the_losses_of_one_with_the_reference_engine(lab: Lab) -> None:
    with_vllm, reference = lab.folder / "vllm", lab.folder / "hf"
    lab.train(with_vllm, timeout_s=START_S, **VLLM)
    lab.train(reference)
    assert len(losses(with_vllm)) == STEPS
    assert losses(with_vllm) == pytest.approx(losses(reference), rel=1e-3)
    assert "EngineCore" in (with_vllm / "logs" / "engine-0.log").read_text()


def vllm_processes(run: Run) -> list[psutil.Process]:
    """vLLM writes its processes' names over their environment, where the rest of a run is found by."""
    return run.member("engine-0").children(recursive=True)


def engine_core(run: Run) -> psutil.Process:
    (core,) = (process for process in vllm_processes(run) if "EngineCore" in " ".join(process.cmdline()))
    return core


@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        pytest.param(engine_core, "engine-0: EngineError: vLLM's process EngineCore", id="engine core"),
        pytest.param(lambda run: run.member("engine-0"), "engine-0 was killed by signal 9", id="engine"),
    ],
)
def test_a_killed_process_ends_the_run_with_its_cause(
    lab: Lab, tmp_path: Path, victim: Callable[[Run], psutil.Process], cause: str
) -> None:
    run = lab.start(tmp_path / "run", train__steps=100_000, **VLLM)
    run.until(lambda: "every process is ready" in run.errors.read_text(), START_S)
    run.train_on()
    held, started = belongings(run), vllm_processes(run)
    victim(run).send_signal(signal.SIGKILL)
    assert run.wait(60) == 1
    assert cause in run.last_line()
    assert "killed by signal 9" in run.last_line()
    assert_nothing_left(run, held)
    assert not [process for process in psutil.wait_procs(started, timeout=5)[1] if lives(process)]
