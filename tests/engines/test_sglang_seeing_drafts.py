"""SGLang drafts for a target that sees: with images its guesses are those of a draft with merged embeddings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import CaptureRequest, ImageSource, SamplingParams
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_kit.drafting import write_draft
from spec_kit.hosting import image_fields
from spec_kit.targets import read_target, read_target_tensors

from ..image_requests import picture, reference_states, request_of
from ..made_once import made_once
from ..seeing_targets import EXPERTS, save_seeing_target
from .conftest import NUM_DRAFT_TOKENS
from .replay import Replay
from .sglang_here import ARGS, needs_sglang
from .test_sglang_images import PATCH, SIZES

if TYPE_CHECKING:
    from PIL import Image

    Pictures = Sequence[tuple[ImageSource, Image.Image]]

pytestmark = [*needs_sglang, pytest.mark.xdist_group("sglang seeing drafts"), pytest.mark.timeout(600)]

KINDS = [
    "qwen2_5_vl",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_vl", "qwen3_5", *EXPERTS)),
]
NEW_TOKENS = 48
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def notes(sglang_environment, tmp_path_factory) -> Iterator[Path]:
    """The file in which the rig notes the guesses of SGLang's draft."""
    notes = tmp_path_factory.mktemp("rig") / "drafts.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_TEST_DRAFTS", str(notes))
        yield notes


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory) -> Path:
    kind = request.param
    return made_once(
        tmp_path_factory, f"seeing-{kind}-{PATCH}", lambda to: save_seeing_target(to, kind, 64, 32, 32, PATCH)
    )


@pytest.fixture(scope="module")
def drafts(target, tmp_path_factory) -> dict[str, Path]:
    """One draft of random weights, of which one folder says ``merged`` and the other ``placeholder``."""
    folder, spec = tmp_path_factory.mktemp("drafts"), read_target(target)
    draft = Eagle3Draft(Eagle3Config(num_steps=3, image_embeddings="merged"))
    torch.manual_seed(1)
    module = draft.build(spec, read_target_tensors(spec), None)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    merged = folder / "merged"
    merged.mkdir()
    write_draft(draft, module.state_dict(), spec, merged)
    placeholder = shutil.copytree(merged, folder / "placeholder")
    fields = json.loads((merged / "config.json").read_text())
    (placeholder / "config.json").write_text(json.dumps(fields | {"image_embeddings": "placeholder"}))
    return {"merged": merged, "placeholder": placeholder}


@pytest.fixture(scope="module")
def engine(target, drafts, notes) -> Iterator[SglangEngine]:
    context = EngineContext(
        backend=CpuBackend(CpuBackend.Config()), placement="colocated", start_s=240.0, peer_s=60.0
    )
    args = ARGS | {"mm_attention_backend": "sdpa"}
    config = SglangConfig(name="sglang", dtype="float32", batch_tokens=128, args=args)
    with SglangEngine.create(config, read_target(target), context) as engine:
        engine.load_draft(drafts["merged"])
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2, num_draft_tokens=NUM_DRAFT_TOKENS))
        yield engine


def answer(engine: SglangEngine, request: CaptureRequest) -> list[int]:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    images = [[image_fields(image) for image in request.images]]
    fields = {"names": [f"drafted-{len(images[0])}"], "ids": [list(request.input_ids)], "images": images}
    assert engine._process is not None
    return engine._process.ask("prefill", **fields, sampling=sampling).result(LIMIT_S)["ids"][0]


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_guesses_are_those_of_our_proposer_with_merged_embeddings(
    engine, target, drafts, notes, num_images
) -> None:
    pictures: Pictures = [picture(size, 5) for size in SIZES[:num_images]]
    request = request_of(target, pictures)
    already = len(notes.read_text().splitlines())
    tokens = answer(engine, request)
    noted = [json.loads(line) for line in notes.read_text().splitlines()[already:]]
    guesses = [tuple(drafts) for step in noted for drafts in step]
    text = CaptureRequest(request_id=0, input_ids=(*request.input_ids, *tokens), destinations=())
    hidden_TNH = reference_states(target, text, pictures)
    compared = {}
    for kind, folder in drafts.items():
        replay = Replay(target, folder, len(request.input_ids), text.input_ids, hidden_TNH)
        steps = replay.steps(guesses)
        assert len(steps) >= 10
        compared[kind] = [step.theirs == step.ours for step in steps]
    assert all(compared["merged"])
    assert all(compared["placeholder"]) == (num_images == 0)
