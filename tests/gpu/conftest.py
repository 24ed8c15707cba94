"""Whole runs on a GPU, for a machine that has one and is otherwise idle: every test compares the device's memory
before and after.

``SPEC_TEST_BACKEND=cpu`` runs what does not need a GPU on the cpu backend, to try the tests themselves.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spec_backend_cuda.backend import CudaBackend

from ..integration import launching
from .device_state import device_state

HERE = Path(__file__).parent
BACKEND = os.environ.get("SPEC_TEST_BACKEND", "cuda")
AVAILABILITY = CudaBackend.probe()
NUM_GPUS = CudaBackend.capabilities().num_devices
LONG_TOKENS = 1 << 15
"""Tokens of the sample that a process with a tiny memory limit cannot hold."""
SETTLE_S = 15.0
"""Longest time for the driver to take back the memory of processes that have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("gpu")
            item.add_marker(
                pytest.mark.skipif(BACKEND == "cuda" and not AVAILABILITY.ok, reason=AVAILABILITY.reason)
            )


@pytest.fixture
def needs_gpu() -> None:
    if BACKEND != "cuda":
        pytest.skip(f"backend {BACKEND} has no such thing")


@pytest.fixture(scope="session")
def lab(
    make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[launching.Lab]:
    """Colocated runs of one engine and one trainer, of as many steps as it takes to disturb them."""
    folder = tmp_path_factory.mktemp("lab")
    keys = {
        "backend.name": BACKEND,
        "target": make_target("llama", initializer_range=0.6, max_position_embeddings=2 * LONG_TOKENS),
        "data.path": launching.write_rows(folder / "rows.jsonl"),
        "placement.kind": "colocated",
        "train.steps": 100_000,
        "train.schedule": "constant",
        "train.lr": 3e-3,
        "train.warmup_steps": 5,
        "train.global_batch_tokens": 96,
        "train.save_every": 5,
        "draft.num_steps": 3,
    }
    with launching.Lab(folder, keys, "") as lab:
        yield lab


@pytest.fixture(autouse=True)
def nothing_left_on_the_device() -> Iterator[None]:
    """Memory and processes of every device are what they were, and no folder of an MPS daemon is left."""
    before = device_state()
    yield
    deadline = time.monotonic() + SETTLE_S
    while (left := device_state().beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"left behind: {left} (before: {before})"
