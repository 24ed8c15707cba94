"""vLLM captures the states that Transformers computes."""

import dataclasses
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import FeatureReceiver
from spec_core.errors import EngineError
from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_engine_vllm.engine import VllmEngine
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget

from .conftest import BATCH_TOKENS, MAX_LENGTH
from .vllm_here import lives, needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

LIMIT_S = 120.0
LAYERS = (0, 2, 4, 5, 8)
"""The embeddings, 2, N / 2, N − 3, and N: the input of the final norm."""
LENGTHS = (5, 1, 17, MAX_LENGTH, 30, 2 * BATCH_TOKENS + 7, BATCH_TOKENS, 3)
"""One token, a whole batch of them, and prompts that take three batches and more."""


@pytest.fixture
def schema() -> FeatureSchema:
    return FeatureSchema(layers=LAYERS, hidden_size=64, dtype="float32")


@pytest.fixture
def receiver(schema: FeatureSchema) -> Iterator[FeatureReceiver]:
    with SharedMemoryTransport().listen(schema, 1 << 24) as receiver:
        yield receiver


def test_states_of_a_llama_equal_those_of_transformers(llama, sharing_engine, schema, receiver) -> None:
    requests = asked_of(receiver)
    sharing_engine(llama).capture(requests, schema).result(LIMIT_S)
    assert_states_of(llama, requests, receiver)


def test_a_prefix_that_samples_share_is_run_once_with_a_prefix_cache(
    vllm_environment, qwen3, config, vllm_context, schema, receiver, monkeypatch, tmp_path
) -> None:
    """Cached blocks hold the states, too; they are those of Transformers, whoever ran the tokens."""
    monkeypatch.setenv("SPEC_TEST_SCHEDULED", str(tmp_path / "scheduled"))
    draw = random.Random(3)
    prefix = tuple(draw.randrange(97) for _ in range(128))
    rows = [prefix + tuple(draw.randrange(97) for _ in range(20 + number)) for number in range(6)]
    requests = [
        CaptureRequest(request_id=index, input_ids=row, destinations=(receiver.address,))
        for index, row in enumerate(rows)
    ]
    args = config.args | {"block_size": 32, "enable_prefix_caching": True}
    shared = config.model_copy(update={"args": args})
    with VllmEngine.create(shared, read_target(qwen3), vllm_context) as engine:
        for some in (requests[:1], requests[1:]):
            engine.capture(some, schema).result(vllm_context.start_s)
    assert_states_of(qwen3, requests, receiver)
    run = sum(map(int, (tmp_path / "scheduled").read_text().split()))
    every = sum(map(len, rows))
    # vLLM may run a token after each prompt.
    assert 0 <= run - (every - 5 * len(prefix)) <= len(rows)


def test_a_closed_engine_leaves_nothing_but_the_states_of_a_qwen3(
    spawning, qwen3, config, vllm_context, schema, receiver, empty_folder
) -> None:
    """E3 and E6, of an engine whose vLLM really ends."""
    processes, threads = set(psutil.Process().children(recursive=True)), threading.active_count()
    requests = asked_of(receiver)
    with VllmEngine.create(config, read_target(qwen3), vllm_context) as engine:
        engine.capture(requests, schema).result(vllm_context.start_s)
        started = set(psutil.Process().children(recursive=True)) - processes
        assert len(started) >= 2  # vLLM and its engine core
    assert not [process for process in started if lives(process)]
    assert threading.active_count() <= threads
    assert [file.name for file in empty_folder.iterdir() if not file.name.startswith("torchinductor")] == []
    assert_states_of(qwen3, requests, receiver)


def test_a_vllm_that_would_run_on_other_hardware_than_the_runs_says_so(
    vllm_environment, llama, config, vllm_context
) -> None:
    backend = OfCards(OfCards.Config())
    there = dataclasses.replace(vllm_context, backend=backend)
    with (
        VllmEngine.create(config, read_target(llama), there) as engine,
        pytest.raises(
            EngineError, match=r"vLLM would run on 'cpu' here, .* 'npu': set backend.name, or install vLLM"
        ),
    ):
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=1))


class OfCards(CpuBackend):
    device_type: ClassVar[str] = "npu"


@pytest.fixture
def empty_folder(monkeypatch) -> Iterator[Path]:
    """Return a folder with a short path for temporary files: pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def asked_of(receiver: FeatureReceiver) -> list[CaptureRequest]:
    draw = random.Random(2)
    rows = [tuple(draw.randrange(97) for _ in range(length)) for length in LENGTHS]
    return [
        CaptureRequest(request_id=index, input_ids=ids, destinations=(receiver.address,))
        for index, ids in enumerate(rows)
    ]


def assert_states_of(target: Path, requests: list[CaptureRequest], receiver: FeatureReceiver) -> None:
    reference = TransformersTarget(target)
    for _ in requests:
        sample = receiver.receive(LIMIT_S)
        ids = requests[sample.request_id].input_ids
        assert tuple(sample.input_ids.tolist()) == ids
        expected_TNH = reference.hidden(ids)[:, list(LAYERS)]
        errors_N = (sample.hidden_TNH - expected_TNH).abs().amax(dim=(0, 2))
        scales_N = expected_TNH.abs().amax(dim=(0, 2))
        assert (errors_N <= 1e-4 * scales_N).all(), (len(ids), (errors_N / scales_N).tolist())
        receiver.release(sample)
