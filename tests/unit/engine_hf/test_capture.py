"""HfEngine.capture against transformers' own hidden states."""

import shutil
import threading
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.errors import ConfigError, EngineError, PeerLost, SchemaMismatch, TargetError
from spec_core.records import CaptureRequest
from spec_engine_hf.engine import HfConfig, HfEngine, forward_passes
from spec_kit.targets.target_reader import read_target

LENGTHS = (5, 31, 1, 17, 31, 2)
WINDOW_BYTES = 1 << 24


def random_rows(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 97, (length,), generator=generator).tolist()) for length in lengths]


def capture(engine, rows, schema):
    """Samples by id, after checking that there is exactly one per row."""
    with engine.context.transport.listen(schema, WINDOW_BYTES) as receiver:
        requests = [
            CaptureRequest(request_id=100 + index, input_ids=row, destinations=(receiver.address,))
            for index, row in enumerate(rows)
        ]
        engine.capture(requests, schema).result(60)
        samples = [receiver.receive(1) for _ in rows]
    assert sorted(sample.request_id for sample in samples) == [request.request_id for request in requests]
    return {sample.request_id - 100: sample for sample in samples}


@torch.no_grad()
def reference_states(folder, row):
    """hidden_states[k] for k < N, then the input of the final norm: [T, N + 1, H]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    seen = []
    norm = getattr(model.base_model, "norm", None) or model.base_model.ln_f
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    states = model(torch.tensor([row]), output_hidden_states=True).hidden_states
    return torch.stack([*(state[0] for state in states[:-1]), seen[0][0]], dim=1)


@pytest.mark.parametrize("shape", ["gemma2", "gpt2"])
def test_captured_states_are_those_of_transformers(make_target, open_engine, schema_of, shape):
    """The contract's suite has a Qwen3."""
    folder = make_target(shape)
    layers = (0, 2, 4, 8)
    rows = random_rows()
    samples = capture(open_engine(folder, batch_tokens=64), rows, schema_of(*layers))
    for index, row in enumerate(rows):
        assert samples[index].input_ids.tolist() == list(row)
        expected = reference_states(folder, row)[:, list(layers)]
        torch.testing.assert_close(samples[index].hidden_TNH, expected, rtol=1e-4, atol=1e-4)


def test_each_sample_owns_exactly_the_memory_of_its_wanted_states(tiny_llama, open_engine, schema_of):
    rows = random_rows()
    samples = capture(open_engine(tiny_llama), rows, schema_of(2, 8))
    assert len({sample.hidden_TNH.data_ptr() for sample in samples.values()}) == len(rows)
    for index, row in enumerate(rows):
        hidden = samples[index].hidden_TNH
        assert hidden.is_contiguous()
        assert hidden.untyped_storage().nbytes() == len(row) * 2 * 32 * 4
        assert not hidden.requires_grad
        assert not hidden.is_inference()


@pytest.mark.parametrize(("layers", "num_run"), [((0, 2), 2), ((5,), 5), ((2, 8), 8), ((0,), 0)])
def test_neither_the_head_nor_layers_above_the_last_captured_one_run(
    tiny_llama, open_engine, schema_of, layers, num_run
):
    engine, run = open_engine(tiny_llama), []
    with register_module_forward_hook(lambda module, *_: run.append(module)):
        capture(engine, random_rows((3, 4)), schema_of(*layers))
    assert len({module for module in run if type(module).__name__ == "LlamaDecoderLayer"}) == num_run
    assert not any(isinstance(module, nn.Linear) and module.out_features == 97 for module in run)


def test_samples_come_in_the_schemas_dtype(tiny_llama, open_engine, schema_of):
    engine = open_engine(tiny_llama)
    row = random_rows((7,))
    wide = capture(engine, row, schema_of(8))[0].hidden_TNH
    narrow = capture(engine, row, schema_of(8, dtype="bfloat16"))[0].hidden_TNH
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize(("config", "is_rounded"), [({}, True), ({"dtype": "float32"}, False)])
def test_target_computes_in_the_configured_dtype(make_target, open_engine, schema_of, config, is_rounded):
    """Or in its own."""
    engine = open_engine(make_target("llama", dtype="bfloat16"), **config)
    states = capture(engine, random_rows((7,)), schema_of(8))[0].hidden_TNH
    assert torch.equal(states, states.bfloat16().float()) is is_rounded


def test_capture_returns_at_once_and_its_future_waits_for_room(tiny_llama, open_engine, schema_of):
    engine, schema = open_engine(tiny_llama), schema_of(8)
    row = random_rows((8,))[0]
    one_sample = 8 * 32 * 4 + 8 * 8
    with engine.context.transport.listen(schema, one_sample) as receiver:
        requests = [
            CaptureRequest(request_id=i, input_ids=row, destinations=(receiver.address,)) for i in range(2)
        ]
        done = engine.capture(requests, schema)
        first = receiver.receive(10)
        assert not done.done()
        receiver.release(first)
        done.result(10)
        assert receiver.receive(1).request_id == 1


def test_close_is_heard_while_a_send_waits(tiny_llama, open_engine, schema_of):
    before = set(threading.enumerate())
    engine, schema = open_engine(tiny_llama), schema_of(8)
    row = random_rows((8,))[0]
    with engine.context.transport.listen(schema, 8 * 32 * 4 + 8 * 8) as receiver:
        requests = [
            CaptureRequest(request_id=i, input_ids=row, destinations=(receiver.address,)) for i in range(3)
        ]
        running, queued = engine.capture(requests, schema), engine.capture(requests, schema)
        receiver.receive(10)
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < 5
    assert running.exception() is not None
    with pytest.raises(EngineError, match="closed"):
        queued.result(0)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.health()
    assert set(threading.enumerate()) <= before


def test_errors_end_up_in_the_future(tiny_llama, open_engine, schema_of):
    engine, schema = open_engine(tiny_llama, batch_tokens=10), schema_of(8)
    with engine.context.transport.listen(schema, WINDOW_BYTES) as receiver:
        address = receiver.address

        def failure(rows, destination=address, wanted=schema):
            requests = [
                CaptureRequest(request_id=0, input_ids=row, destinations=(destination,)) for row in rows
            ]
            return engine.capture(requests, wanted).exception(60)

        assert isinstance(failure([(1, 2)], destination="inline:99"), PeerLost)
        assert isinstance(failure([(1, 2)], wanted=schema_of(7)), SchemaMismatch)
        assert isinstance(failure([(1, 200)]), EngineError)
        too_long = failure([(1,) * 11])
        assert isinstance(too_long, ConfigError)
        assert "engine.batch_tokens=10" in str(too_long)
        assert "8 layers" in str(failure([(1, 2)], wanted=schema_of(9)))
        assert isinstance(failure([(1, 2)], wanted=schema_of(8, hidden_size=31)), EngineError)
        assert failure([(1, 2)]) is None


def test_health_finds_a_target_that_computes_nan(tiny_llama, open_engine, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    open_engine(tiny_llama).health()
    with pytest.raises(EngineError, match="not finite"):
        open_engine(folder).health()


@pytest.mark.parametrize(
    ("lengths", "budget", "passes"),
    [
        ([], 10, []),
        ([3, 10, 4, 5], 10, [[1], [3, 2], [0]]),
        ([5, 5, 5, 5], 10, [[0, 1], [2, 3]]),
        ([1, 1, 1], 3, [[0, 1, 2]]),
    ],
)
def test_forward_passes_hold_similar_lengths_within_the_budget(lengths, budget, passes):
    requests = [
        CaptureRequest(request_id=i, input_ids=(0,) * n, destinations=()) for i, n in enumerate(lengths)
    ]
    assert forward_passes(requests, budget) == passes


def test_target_whose_head_is_not_what_its_config_says_is_refused(make_target):
    """TargetSpec is read without transformers; a wrong reading must not become a wrong teacher."""
    folder = make_target("granite", logits_scaling=8.0)
    target = read_target(folder)
    object.__setattr__(target, "logit_scale", 1.0)
    with pytest.raises(TargetError, match="cannot be expressed"):
        HfEngine.create(HfConfig(), target, EngineContext(backend=CpuBackend(CpuBackend.Config())))


def test_target_without_one_stack_of_layers_is_refused(tiny_llama):
    target = read_target(tiny_llama)
    object.__setattr__(target, "num_layers", 7)
    with pytest.raises(EngineError, match="one stack of 7 layers"):
        HfEngine.create(HfConfig(), target, EngineContext(backend=CpuBackend(CpuBackend.Config())))


def test_target_that_transformers_cannot_load_is_a_usage_error(make_target, tmp_path):
    target = read_target(make_target("llama"))
    object.__setattr__(target, "folder", tmp_path)
    with pytest.raises(TargetError, match="cannot load"):
        HfEngine.create(HfConfig(), target, EngineContext(backend=CpuBackend(CpuBackend.Config())))
