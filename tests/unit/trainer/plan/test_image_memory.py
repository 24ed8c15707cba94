"""Memory that an engine needs for images, as a plan counts it before anything starts."""

import json
import math
from dataclasses import replace

import pytest
from PIL import Image

from spec_core import Engine, plugins
from spec_core.records import Capabilities
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.targets import TargetImages, stored_tensors
from spec_trainer.plan.image_encoder import read_image_encoder
from spec_trainer.plan.image_memory import image_bytes
from spec_trainer.plan.memory import RunSizes, rooms
from spec_trainer.plan.resolve import resolve

from ....seeing_targets import ALL_SEEING

SIZES = [[(8, 8)], [], [(40, 40), (16, 8), (40, 40)], [(40, 40)]]
"""Sizes of the pictures of each row; 40 x 40 is the largest that is not scaled down."""


@pytest.fixture
def resolved(seeing_target, tmp_path):
    """``resolved(kind, *overrides, sizes=SIZES)``: a run on rows with pictures."""

    def make(kind: str, *overrides: str, sizes=SIZES):
        rows = []
        for number, shown in enumerate(sizes):
            parts = [{"type": "text", "text": f"Row {number}"}]
            for index, size in enumerate(shown):
                Image.new("RGB", size).save(tmp_path / f"{number}-{index}.png")
                parts.append({"type": "image", "image": f"{number}-{index}.png"})
            answer = {"role": "assistant", "content": "Black."}
            rows.append({"messages": [{"role": "user", "content": parts}, answer]})
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        words = [
            f"target={seeing_target(kind)}",
            f"data.path={tmp_path / 'rows.jsonl'}",
            f"output={tmp_path}/run",
        ]
        more = [
            f"data.media_root={tmp_path}",
            "data.eval_samples=1",
            "train.warmup_steps=1",
            "draft.num_steps=2",
        ]
        return resolve(None, {}, [*words, *more, *overrides])

    return make


def host_parts(run) -> dict[str, int]:
    (room,) = (room for room in rooms(run, RunSizes(run)) if room.name == "this host's memory")
    return {part.what: part.num_bytes for part in room.parts}


@pytest.mark.parametrize("kind", ALL_SEEING)
def test_a_plan_counts_the_encoder_its_activations_and_the_pixels_of_a_row(resolved, seeing_target, kind):
    run, folder = resolved(kind), seeing_target(kind)
    encoder, images = read_image_encoder(folder), TargetImages(folder)
    counts = [images.num_tokens(Image.new("RGB", size)) for size in SIZES[2]]
    parts = host_parts(run)
    weights = {name: 4 * math.prod(tensor.shape) for name, tensor in stored_tensors(folder).items()}
    own = sum(weights[name] for name in encoder.tensors)
    assert parts["the image encoder's weights in 1 engine"] == own
    assert parts["the target's weights in 1 engine"] == sum(weights.values()) - own
    assert parts["the image encoder's activations in 1 engine"] == encoder.activation_bytes(max(counts), 4)
    assert parts["pixels of images in 1 engine"] == encoder.pixel_bytes(sum(counts))


def test_engines_need_it_each_and_the_dtype_counts(resolved):
    one = host_parts(resolved("qwen3_vl", "placement.kind=colocated"))
    more = host_parts(resolved("qwen3_vl", "placement.kind=colocated", "engine.replicas=2"))
    narrow = host_parts(resolved("qwen3_vl", "engine.dtype=bfloat16"))
    for what in ("the image encoder's weights", "the image encoder's activations", "pixels of images"):
        assert more[f"{what} in 2 engines"] == 2 * one[f"{what} in 1 engine"]
        factor = 1 if what == "pixels of images" else 2  # they are prepared in float32
        assert factor * narrow[f"{what} in 1 engine"] == one[f"{what} in 1 engine"]


def test_rows_of_text_need_the_encoders_weights_alone(resolved):
    parts = host_parts(resolved("qwen3_vl", sizes=[[], [], []]))
    assert parts["the image encoder's weights in 1 engine"] > 0
    assert not any("activations" in what or "pixels" in what for what in parts)


def test_a_target_without_an_encoder_needs_nothing(seeing_target, resolved, tmp_path, monkeypatch):
    run = resolved("qwen3_vl")
    monkeypatch.setattr("spec_trainer.plan.image_memory.read_image_encoder", lambda _: None)
    assert image_bytes(run, 4) is None
    assert not any("image" in what for what in host_parts(run))


def test_what_does_not_fit_names_the_images(resolved, monkeypatch):
    run = resolved("qwen2_5_vl")
    monkeypatch.setattr("spec_trainer.plan.memory.free_host_bytes", lambda: 1)
    (room,) = (room for room in rooms(run, RunSizes(run)) if room.name == "this host's memory")
    assert {"the image encoder's weights in 1 engine", "pixels of images in 1 engine"} <= room.document()[
        "parts"
    ].keys()


def test_an_engine_that_starts_with_the_largest_image_needs_room_for_it(resolved, seeing_target, monkeypatch):
    """A device has memory of its own; on a CPU, vLLM runs no such pass."""
    encoder = read_image_encoder(seeing_target("qwen3_vl"))
    run = resolved("qwen3_vl", sizes=[[(8, 8)], [(8, 8)]])
    small = image_bytes(run, 2)
    for engine, on_device in (("hf", True), ("vllm", False), ("vllm", True)):
        engine_type = plugins.load(Engine, engine)
        config = run.config.model_copy(update={"engine": engine_type.Config(name=engine)})
        other = replace(run, config=config, engine_type=engine_type)
        device = Capabilities(device_bytes=1 << 30) if on_device else Capabilities()
        monkeypatch.setattr(type(run.backend), "capabilities", lambda _, device=device: device)
        found = image_bytes(other, 2)
        if engine == "vllm" and on_device:
            assert found.activations == encoder.activation_bytes(encoder.most_tokens, 2) > small.activations
            assert found.pixels == encoder.pixel_bytes(encoder.most_tokens)
        else:
            assert found == small


def test_vllm_measures_with_the_largest_image_unless_arguments_say_otherwise():
    assert VllmEngine.runs_largest_image(VllmConfig(name="vllm"))
    assert not VllmEngine.runs_largest_image(VllmConfig(name="vllm", args={"skip_mm_profiling": True}))
