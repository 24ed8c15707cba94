"""The processes of a real SGLang: refusals, restarts, fresh weights, and what is left when one of them dies."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from spec_backend_cpu.backend import CpuBackend
from spec_core.errors import EngineError
from spec_core.records import CaptureRequest, FeatureSchema, GenerationRequest, SamplingParams
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_kit.targets.target_reader import read_target
from spec_kit.weight_sync import Publisher, open_weight_transports
from spec_testing import draw_draft

from .served_states import answers_of
from .sglang_here import needs_sglang, new_sglang

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang processes"),
    pytest.mark.timeout(600),
]
LIMIT_S = 60.0
PROMPTS = [[5 + number, 6, 7] for number in range(24)]


def request(address: str, *ids: int) -> list[CaptureRequest]:
    return [CaptureRequest(request_id=0, input_ids=ids, destinations=(address,))]


def test_it_restarts_when_answers_have_ended_refuses_and_tells_its_death(llama) -> None:
    target = read_target(llama)
    schema = FeatureSchema(layers=(0, 3), hidden_size=target.hidden_size, dtype="float32")
    left = [GenerationRequest(prompt=prompt) for prompt in PROMPTS]
    sampling = SamplingParams(max_new_tokens=8, stop_at_eos=False)
    with new_sglang(target) as engine, SharedMemoryTransport().listen(schema, 1 << 20) as receiver:
        answers = engine.generate_unordered(lambda: left.pop(0) if left else None, sampling)
        found = [next(answers)]
        engine.start(schema)
        found += answers
        texts = {tuple(one.prompt): answer.token_ids for one, answer in found}
        assert [list(texts[tuple(prompt)]) for prompt in PROMPTS] == answers_of(llama, PROMPTS, 8)

        with pytest.raises(EngineError, match=r"token ids from 97 to 97, target .* has 0 to 96"):
            engine.capture(request(receiver.address, 97), schema).result(LIMIT_S)
        too_long = target.max_positions + 1
        with pytest.raises(EngineError, match=f"{too_long} tokens"):
            engine.capture(request(receiver.address, *[5] * too_long), schema).result(LIMIT_S)
        assert isinstance(engine.capture(request("nowhere", 5), schema).exception(LIMIT_S), EngineError)
        engine.capture(request(receiver.address, 5), schema).result(LIMIT_S)
        engine.health()

        tests = psutil.Process()
        of_sglang = [one for one in tests.children(recursive=True) if one.ppid() != tests.pid]
        assert len(of_sglang) >= 2  # it computes in one, and makes text in another
        for process in of_sglang:
            process.send_signal(signal.SIGSTOP)
        waiting = engine.capture(request(receiver.address, 5), schema)
        for process in of_sglang:
            process.kill()
        assert isinstance(waiting.exception(LIMIT_S), EngineError)
        with pytest.raises(EngineError, match="has ended"):
            engine.health()


def test_fresh_weights_reach_the_draft_while_it_serves(llama, tmp_path) -> None:
    target = read_target(llama)
    draft = tmp_path / "draft"
    draw_draft(draft, target, seed=0)
    drafting = SamplingParams(max_new_tokens=4, num_draft_tokens=3)
    tensors = load_file(draft / "model.safetensors")
    changed = {**tensors, "fc.weight": tensors["fc.weight"] + 1}
    transports = open_weight_transports(CpuBackend(CpuBackend.Config()), ["file"])
    with new_sglang(target) as engine, Publisher(transports, target.digest) as publisher:
        engine.load_draft(draft)
        replica = engine.draft_replica()
        with pytest.raises(EngineError, match="serves no draft now"):
            replica.status().result(LIMIT_S)
        assert engine.generate([[5]], drafting)[0].draft_version is None
        publisher.add("sglang", replica).result(LIMIT_S)
        report = publisher.publish(1, changed).result(LIMIT_S)
        assert report.committed, report
        assert engine.acceptance().rounds == 0
        (answer,) = engine.generate([[5]], drafting)
        assert (answer.draft_version, answer.draft_digest) == (1, report.digest)
        assert engine.acceptance().rounds > 0
        refused = publisher.publish(2, {**changed, "more": torch.zeros(1)}).result(LIMIT_S)
        assert "has more besides" in refused.replicas["sglang"].reason
        assert replica.status().result(LIMIT_S).version == 1
        assert publisher.publish(3, tensors).result(LIMIT_S).committed
        publisher.revert().result(LIMIT_S)
        assert replica.status().result(LIMIT_S).version == 1


def test_a_start_that_fails_says_why(llama) -> None:
    with new_sglang(read_target(llama), attention_back_end="triton") as engine:
        with pytest.raises(EngineError, match=r"did not start: TypeError: .*attention_back_end"):
            engine.generate([[5]], SamplingParams(max_new_tokens=1))
        engine.health()  # the next call may start it with more luck


def test_a_closed_engine_ends_a_start(llama) -> None:
    target = read_target(llama)
    schema = FeatureSchema(layers=(0,), hidden_size=target.hidden_size, dtype="float32")
    with new_sglang(target) as engine:
        starting = engine.capture([], schema)
        time.sleep(0.3)
    assert isinstance(starting.exception(LIMIT_S), EngineError)
    with pytest.raises(EngineError, match="closed"):
        engine.start(schema)


_KILLED = """
import sys
from pathlib import Path
from spec_core.records import SamplingParams
from spec_kit.targets.target_reader import read_target
from tests.engines.sglang_here import new_sglang
engine = new_sglang(read_target(Path(sys.argv[1])))
engine.generate([[5, 6]], SamplingParams(max_new_tokens=1))
print("up", flush=True)
input()
"""


def test_kill_9_of_the_engines_process_leaves_nothing(llama) -> None:
    words = [sys.executable, "-c", _KILLED, str(llama)]
    pipe = psutil.subprocess.PIPE
    with psutil.Popen(
        words, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[2], env=os.environ
    ) as process:
        assert process.stdout.readline() == b"up\n"
        family = process.children(recursive=True)
        assert len(family) >= 4  # the reaper, and SGLang's three
        process.kill()
    end = time.monotonic() + LIMIT_S
    while left := [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, f"left: {[one.cmdline() for one in left]}"
        time.sleep(0.1)
