"""vLLM captures the states of a target with quantised weights: those by which it serves."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget

from ..quantised_targets import distance, write_dequantised
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

LIMIT_S = 120.0
LAYERS = (2, 4, 5, 8)
LARGEST = 7
"""Largest magnitude of a weight's integer: coarse, so that the quantised target differs visibly from the original."""
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token",
            },
        }
    },
}  # fmt: skip
"""The layout of published W8A8 models: linear layers in int8 with a scale per row, activations rounded per token."""


@pytest.fixture
def original(make_target) -> Path:
    return make_target("llama", dtype="bfloat16", hidden_size=64, head_dim=32, initializer_range=0.1)


@pytest.fixture
def quantised(original, tmp_path) -> Path:
    """The original with weights in int8; embedding, head and norms are as they were."""
    folder = shutil.copytree(original, tmp_path / "quantised")
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(original / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale_R1 = (weight.float().abs().amax(dim=1, keepdim=True) / LARGEST).bfloat16()
        values = (weight.float() / scale_R1.float()).round().clamp(-LARGEST, LARGEST)
        weights[name], weights[f"{name}_scale"] = values.to(torch.int8), scale_R1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return folder


@pytest.fixture
def dequantised(quantised, tmp_path) -> Path:
    """The quantised target with its weights in float32."""
    return write_dequantised(quantised, tmp_path / "dequantised")


def test_states_and_teacher_of_a_quantised_target_are_those_that_it_serves_by(
    sharing_engine, original, quantised, dequantised
) -> None:
    """The states are near the dequantised reference's, and far from the original's."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 97) for _ in range(length)] for length in (5, 17, 30, 41, 60, 90)]
    schema = FeatureSchema(layers=LAYERS, hidden_size=64, dtype="bfloat16")
    engine = sharing_engine(quantised)
    with SharedMemoryTransport().listen(schema, 1 << 22) as receiver:
        requests = [
            CaptureRequest(request_id=index, input_ids=tuple(ids), destinations=(receiver.address,))
            for index, ids in enumerate(prompts)
        ]
        engine.capture(requests, schema).result(LIMIT_S)
        hidden: dict[int, Tensor] = {}
        for _ in requests:
            sample = receiver.receive(LIMIT_S)
            hidden[sample.request_id] = sample.hidden_TNH.float().clone()
            receiver.release(sample)
    near, far = TransformersTarget(dequantised), TransformersTarget(original)
    for index, ids in enumerate(prompts):
        states = [one.hidden(ids)[:, list(LAYERS)] for one in (near, far)]
        to_near, to_far = (distance(hidden[index], expected) for expected in states)
        assert to_near < 0.5 * to_far, (to_near, to_far)

    target = read_target(quantised)
    assert (target.dtype, target.head_name) == ("bfloat16", "lm_head.weight")
    head_VH = load_file(quantised / "model.safetensors")[target.head_name].float()
    norm = near.model.model.norm
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=1, stop_at_eos=False))
    for index, answer in enumerate(answers):
        logits_V = norm(hidden[index][-1, -1]) @ head_VH.T
        (served,) = answer.token_ids
        assert logits_V[served] >= logits_V.max() - 0.02 * logits_V.abs().max()
