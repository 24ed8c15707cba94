"""The same run on the CPU, on a GPU in one process, on a GPU shared by two, and on two GPUs, with every engine that
is installed: the same loss curve.

::

    pytest tests/gpu/test_loss_curves.py
"""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from spec_core import Engine, plugins

from ..integration.launching import Lab
from ..integration.run_directory import losses
from .conftest import NUM_GPUS

STEPS = 50
Curve = list[float]
OF_ENGINE: dict[str, dict[str, object]] = {
    "hf": {},
    "vllm": {"engine__enforce_eager": "true", "engine__kv_cache_bytes": 1 << 30},
    "sglang": {
        "engine__args": "{attention_backend: triton, sampling_backend: pytorch, disable_cuda_graph: true, "
        "mem_fraction_static: 0.3}"
    },
}

pytestmark = pytest.mark.usefixtures("needs_gpu")


@pytest.fixture(scope="module")
def curve(lab: Lab, make_target: Callable[..., Path]) -> Callable[..., Curve]:
    """(backend, placement, dtype, engine) -> loss of every step. Each run is made once."""

    rows = _rows(lab.folder / "long-rows.jsonl")

    @cache
    def train(backend: str, placement: str, dtype: str, engine: str = "hf") -> Curve:
        # Heads as wide as the engines' attention kernels take.
        target = make_target("llama", dtype=dtype, hidden_size=128, head_dim=64, initializer_range=0.2)
        output = lab.folder / f"{backend}-{placement}-{dtype}-{engine}"
        keys = {"backend__name": backend, "placement__kind": placement, "train__dtype": dtype}
        keys |= {"target": target, "data__path": rows, "engine__name": engine, "train__steps": STEPS}
        lab.train(output, 300, **keys, train__global_batch_tokens=4096, **OF_ENGINE[engine])
        return losses(output)

    return train


@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_in_float32_a_gpu_follows_the_cpu(curve, placement) -> None:
    expected = curve("cpu", "inline", "float32")
    assert expected[-1] < 0.7 * expected[0]
    assert curve("cuda", placement, "float32") == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 1e-2)])
def test_two_processes_train_as_one_does(curve, placement, dtype, tolerance) -> None:
    _needs_gpus_for(placement)
    inline, apart = curve("cuda", "inline", dtype), curve("cuda", placement, dtype)
    assert len(apart) == STEPS
    assert apart == pytest.approx(inline, rel=tolerance)


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_engine_gives_the_curve_of_the_inline_run(curve, engine, placement) -> None:
    _needs_gpus_for(placement)
    found = plugins.load(Engine, engine).probe()
    if not found.ok:
        pytest.skip(found.reason)
    assert curve("cuda", placement, "bfloat16", engine) == pytest.approx(
        curve("cuda", "inline", "bfloat16"), rel=1e-2
    )


def _rows(file: Path) -> Path:
    """Enough tokens for a step that its mean loss hides what bfloat16 does to single tokens."""
    draw = random.Random(0)
    with file.open("w") as rows:
        for length in (draw.randint(64, 200) for _ in range(256)):
            first, pace = draw.randrange(97), draw.choice([1, 2])
            ids = [(first + pace * position) % 97 for position in range(length)]
            rows.write(
                json.dumps({"input_ids": ids, "loss_mask": [int(position > 1) for position in range(length)]})
                + "\n"
            )
    return file


def _needs_gpus_for(placement: str) -> None:
    if placement == "disaggregated" and NUM_GPUS < 2:
        pytest.skip("disaggregated needs two GPUs")
