"""SglangEngine with its real processes, hook and transport, around a stand-in for SGLang (``sglang_stand_in``)."""

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.errors import EngineError
from spec_core.records import (
    AcceptanceCounters,
    CaptureRequest,
    FeatureSchema,
    GenerationRequest,
    SamplingParams,
)
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_kit.drafting import write_draft
from spec_kit.hosting import engine_subprocess
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_kit.targets.target_reader import read_target
from spec_kit.weight_sync import Publisher, open_weight_transports

from .stand_in import STAND_IN, stand_in_model

LIMIT_S = 60.0
SCHEMA = FeatureSchema(layers=(0, 4, 8), hidden_size=32, dtype="float32")


@pytest.fixture
def open_engine(tiny_llama, monkeypatch, caplog):
    """``open_engine(**config)``: closed after the test, which then has left nothing."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    caplog.set_level(logging.INFO)
    engines = []

    def open_one(**config):
        backend = CpuBackend(CpuBackend.Config())
        context = EngineContext(backend=backend, placement="colocated", start_s=LIMIT_S, peer_s=30.0)
        engines.append(SglangEngine.create(SglangConfig(**config), read_target(tiny_llama), context))
        return engines[-1]

    before = set(psutil.Process().children(recursive=True))
    yield open_one
    for engine in engines:
        engine.close()
        engine.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert [process.cmdline() for process in left] == []
    sockets = [line.split()[-1] for line in caplog.messages if line.startswith("socket ")]
    assert [file for file in sockets if Path(file).exists()] == []


@pytest.fixture(scope="session")
def reference(tiny_llama):
    with torch.random.fork_rng():
        return stand_in_model.Model(tiny_llama)


def requests_to(address, *lengths, first_id=0):
    return [
        CaptureRequest(
            request_id=first_id + i,
            input_ids=tuple((first_id + 5 * i + 3 * t) % 97 for t in range(length)),
            destinations=(address,),
        )
        for i, length in enumerate(lengths)
    ]


def test_captured_states_are_the_models(open_engine, reference):
    """Unequal lengths, two batches one behind the other, prompts longer than a pass, as long as the target takes."""
    engine = open_engine(batch_tokens=16, send_timeout_s=5.0)
    with SharedMemoryTransport().listen(SCHEMA, 1 << 20) as receiver:
        batches = [
            requests_to(receiver.address, 5, 1, 30, 9),
            requests_to(receiver.address, 256, 3, first_id=10),
        ]
        engine.start(SCHEMA)
        engine.health()
        running = [engine.capture(batch, SCHEMA) for batch in batches]
        assert [future.result(LIMIT_S) for future in running] == [None, None]
        wanted = {request.request_id: request.input_ids for batch in batches for request in batch}
        for _ in range(len(wanted)):
            sample = receiver.receive(LIMIT_S)
            ids = wanted.pop(sample.request_id)
            assert tuple(sample.input_ids.tolist()) == ids
            expected = reference.states(list(ids))[:, list(SCHEMA.layers)]
            torch.testing.assert_close(sample.hidden_TNH, expected, rtol=1e-4, atol=1e-5)
            receiver.release(sample)
        _refusals_leave_it_serving(engine, receiver)
        _death_is_told(engine, receiver)


def _refusals_leave_it_serving(engine, receiver):
    beyond = CaptureRequest(request_id=0, input_ids=(97,), destinations=(receiver.address,))
    with pytest.raises(EngineError, match=r"token ids from 97 to 97, target .* has 0 to 96"):
        engine.capture([beyond], SCHEMA).result(LIMIT_S)
    with pytest.raises(EngineError, match="257 tokens"):
        engine.capture(requests_to(receiver.address, 257), SCHEMA).result(LIMIT_S)
    gone = requests_to("nowhere", 3)
    assert isinstance(engine.capture(gone, SCHEMA).exception(LIMIT_S), EngineError)
    engine.capture(requests_to(receiver.address, 3), SCHEMA).result(LIMIT_S)
    engine.health()


def _death_is_told(engine, receiver):
    """Whoever asks, and whoever waits."""
    scheduler = _scheduler()
    scheduler.send_signal(signal.SIGSTOP)
    waiting = engine.capture(requests_to(receiver.address, 3), SCHEMA)
    time.sleep(0.5)
    scheduler.kill()
    psutil.Process(scheduler.ppid()).send_signal(signal.SIGQUIT)
    assert isinstance(waiting.exception(LIMIT_S), EngineError)
    with pytest.raises(EngineError, match="SGLang has ended"):
        engine.health()


def _scheduler():
    """The process of the stand-in's scheduler: the one that has loaded the model."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile: another test's, perhaps
            if any("spawn_main" in word for word in process.cmdline()):
                return process
    raise AssertionError("the stand-in has no scheduler")


def test_generation_and_counters(open_engine, eagle3_folder):
    engine = open_engine(args={"attention_backend": "triton"})
    (plain,) = engine.generate([[5, 6]], SamplingParams(max_new_tokens=3))
    assert plain.token_ids == (7, 8, 9)
    assert plain.top2_margin == (1.75, 1.75, 1.75)
    assert plain.guess_depths == ()
    with pytest.raises(EngineError, match="no draft is loaded"):
        engine.generate([[5]], SamplingParams(max_new_tokens=3, num_draft_tokens=2))
    engine.load_draft(eagle3_folder)
    assert engine.acceptance() == AcceptanceCounters()
    answers = engine.generate([[5], [9, 4]], SamplingParams(max_new_tokens=2, num_draft_tokens=3))
    assert [answer.token_ids for answer in answers] == [(6, 7), (5, 6)]
    # Per answer: two rounds accept nothing, one accepts all three.
    assert engine.acceptance() == AcceptanceCounters(
        rounds=6, drafted=18, accepted=6, accepted_per_position=(2, 2, 2)
    )
    assert engine.acceptance().acceptance_length == 2.0
    assert [answer.verifications for answer in answers] == [(2, 0, 0, 1)] * 2
    streaming = SamplingParams(max_new_tokens=2, num_draft_tokens=3, with_times=True, concurrency=1)
    streamed = engine.generate([[5], [9, 4]], streaming)
    assert [answer.token_ids for answer in streamed] == [(6, 7), (5, 6)]
    assert [answer.verifications for answer in streamed] == [(2, 0, 0, 1)] * 2
    assert all(0 < first <= second for first, second in (answer.times_s for answer in streamed))
    assert [answer.guess_depths for answer in (*answers, *streamed)] == [(0, 1)] * 4
    (longer,) = engine.generate([[5]], SamplingParams(max_new_tokens=7, num_draft_tokens=3))
    assert longer.guess_depths == (0, 1, 1, 1, 2, 3, 0)
    engine.load_draft(eagle3_folder)
    assert engine.acceptance().rounds == 0


def test_call_that_restarts_sglang_waits_for_answers_in_progress(open_engine):
    engine, taken = open_engine(args={"stand_in_pause_s": 0.1}), []

    def next_request():
        if len(taken) < 20:
            taken.append(GenerationRequest(prompt=[5 + len(taken)]))
            return taken[-1]
        return None

    answers = engine.generate_unordered(next_request, SamplingParams(max_new_tokens=2))
    found = [next(answers)]
    assert len(taken) == 8  # twice as many as the stand-in says it runs at once
    engine.start(SCHEMA)
    found += answers
    assert sorted((request.prompt[0], *answer.token_ids) for request, answer in found) == [
        (first, first + 1, first + 2) for first in range(5, 25)
    ]


def test_fresh_weights_reach_the_draft_while_it_serves(open_engine, eagle3_folder, tiny_llama):
    drafting = SamplingParams(max_new_tokens=2, num_draft_tokens=3)
    engine = open_engine()
    engine.load_draft(eagle3_folder)
    replica = engine.draft_replica()
    with pytest.raises(EngineError, match="serves no draft now"):
        replica.status().result(LIMIT_S)
    assert engine.generate([[5]], drafting)[0].draft_version is None
    transports = open_weight_transports(CpuBackend(CpuBackend.Config()), ["file"])
    tensors = load_file(eagle3_folder / "model.safetensors")
    with Publisher(transports, read_target(tiny_llama).digest) as publisher:
        publisher.add("sglang", replica).result(LIMIT_S)
        changed = {**tensors, "fc.weight": tensors["fc.weight"] + 1}
        report = publisher.publish(1, changed).result(LIMIT_S)
        assert report.committed, report
        assert engine.acceptance().rounds == 0
        (answer,) = engine.generate([[5]], drafting)
        assert (answer.draft_version, answer.draft_digest) == (1, report.digest)
        assert engine.acceptance().rounds == 3
        refused = publisher.publish(2, {**changed, "more": torch.zeros(1)}).result(LIMIT_S)
        assert "has more besides" in refused.replicas["sglang"].reason
        assert replica.status().result(LIMIT_S).version == 1
        assert publisher.publish(3, tensors).result(LIMIT_S).committed
        publisher.revert().result(LIMIT_S)
        assert replica.status().result(LIMIT_S).version == 1


def test_a_start_that_fails_says_why(open_engine):
    engine = open_engine(args={"attention_back_end": "triton"})
    with pytest.raises(
        EngineError, match=r"did not start: TypeError: .*unexpected keyword .*attention_back_end"
    ):
        engine.start(SCHEMA)
    engine.health()  # the next call may start it with more luck


def test_an_sglang_without_the_plugin_is_told(open_engine, monkeypatch):
    monkeypatch.setattr(engine_subprocess, "_CONNECTED_S", 0.2)
    engine = open_engine(args={"stand_in_without_plugins": True})
    with pytest.raises(EngineError, match="started without the plugin 'spec-trainer'"):
        engine.start(SCHEMA)


def test_a_closed_engine_ends_a_start(open_engine):
    engine = open_engine()
    starting = engine.capture([], SCHEMA)
    time.sleep(0.3)
    engine.close()
    assert isinstance(starting.exception(LIMIT_S), EngineError)
    with pytest.raises(EngineError, match="closed"):
        engine.health()
    with pytest.raises(EngineError, match="closed"):
        engine.start(SCHEMA)


_KILLED = """\
import json, sys
from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import SamplingParams
from spec_kit.targets.target_reader import read_target
from spec_engine_sglang.engine import SglangEngine
from pathlib import Path
engine = SglangEngine.create(
    SglangEngine.Config(), read_target(Path(sys.argv[1])), EngineContext(backend=CpuBackend(CpuBackend.Config()))
)
engine.generate([[1, 2]], SamplingParams(max_new_tokens=1))
print("up", flush=True)
input()
"""


def test_kill_9_of_the_engines_process_leaves_nothing(tiny_llama):
    paths = os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", _KILLED, str(tiny_llama)]
    pipe = psutil.subprocess.PIPE
    with psutil.Popen(words, stdin=pipe, stdout=pipe, stderr=psutil.subprocess.DEVNULL, env=env) as process:
        assert process.stdout.readline() == b"up\n"
        family = process.children(recursive=True)
        assert len(family) >= 3  # reaper, SGLang's process, scheduler
        process.kill()
    for _ in range(100):
        if all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in family):
            return
        time.sleep(0.1)
    pytest.fail(f"left: {[p.cmdline() for p in family if p.is_running()]}")


@pytest.fixture(scope="session")
def eagle3_folder(tiny_llama, tmp_path_factory):
    """An exported, untrained draft."""
    from spec_core import Draft, plugins
    from spec_kit.targets.target_reader import read_target_tensors

    folder = tmp_path_factory.mktemp("draft")
    target = read_target(tiny_llama)
    draft_type = plugins.load(Draft, "eagle3")
    draft = draft_type(draft_type.Config(name="eagle3"))
    with torch.random.fork_rng():
        module = draft.build(target, read_target_tensors(target), None)
    write_draft(draft, module.state_dict(), target, folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    return folder
