"""The real llama.cpp: texts as of the plain target, and each draft's guesses as of our own forward pass."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_backend_cpu.backend import CpuBackend
from spec_core import Engine, EngineContext
from spec_core.errors import ConfigError, EngineError
from spec_core.records import FeatureSchema, SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_engine_llamacpp.config import LlamacppConfig
from spec_engine_llamacpp.engine import LlamacppEngine
from spec_kit.targets import read_target
from spec_testing import EngineSuite, TransformersTarget, draw_draft

from ..gguf_targets import LLAMA3, write_target_gguf
from .llamacpp_drafts import DRAFTS, RECURRENT, SHAPE
from .replay import Replay

pytest.importorskip("xllamacpp")
pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("llamacpp"), pytest.mark.timeout(120)]

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
EXACT = {"attention": "f32", "draft_type": "f32"}


@pytest.fixture(scope="session")
def as_gguf(tmp_path_factory) -> Callable[[Path], Path]:
    """``as_gguf(folder)``: the target in the folder as a GGUF file."""
    files: dict[Path, Path] = {}

    def convert(folder: Path) -> Path:
        if folder not in files:
            files[folder] = write_target_gguf(folder, tmp_path_factory.mktemp("gguf") / "target.gguf")
        return files[folder]

    return convert


@pytest.fixture(scope="session")
def folder(make_target) -> Path:
    return make_target("llama", **SHAPE)


@pytest.fixture
def context() -> EngineContext:
    return EngineContext(backend=CpuBackend(CpuBackend.Config(name="cpu")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 16) for _ in range(draw.randrange(3, 40))] for _ in range(12)]


class TestLlamacppEngine(EngineSuite):
    placement = "colocated"

    @pytest.fixture
    def new_engine(self, folder, as_gguf) -> Callable[[EngineContext], Engine]:
        config = LlamacppConfig(gguf=as_gguf(folder), slots=2, **EXACT)
        return lambda context: LlamacppEngine.create(config, read_target(folder), context)

    @pytest.fixture
    def reference(self, folder) -> TransformersTarget:
        return TransformersTarget(folder)

    @pytest.fixture
    def draft_folder(self, folder, tmp_path) -> Path:
        return draw_draft(tmp_path / "draft", read_target(folder), 0, **DRAFTS["eagle3"])

    @pytest.fixture
    def schema(self) -> FeatureSchema:
        pytest.skip("llama.cpp's server hands out no states: test_it_captures_nothing")


def test_it_captures_nothing(folder, as_gguf, context):
    target, schema = read_target(folder), FeatureSchema(layers=(2, 8), hidden_size=64, dtype="float32")
    config = LlamacppConfig(gguf=as_gguf(folder))
    with pytest.raises(ConfigError, match="captures no hidden states; train with another engine"):
        LlamacppEngine.check_capture(config, schema)
    with LlamacppEngine.create(config, target, context) as engine, pytest.raises(EngineError):
        engine.start(schema)


CASES = {
    **{(shape, name): (shape, {}, name, {}) for shape in ("llama", "qwen3") for name in DRAFTS},
    ("llama", "eagle3, half the vocabulary"): ("llama", {}, "eagle3", {"vocab_size": 8}),
    ("llama", "dflash, half the vocabulary"): ("llama", {}, "dflash", {"vocab_size": 8}),
    ("llama", "dspark, half the vocabulary"): ("llama", {}, "dspark", {"vocab_size": 8}),
    ("llama", "dflash2, half the vocabulary"): ("llama", {}, "dflash2", {"vocab_size": 8}),
    ("llama", "eagle3, other layers"): ("llama", {}, "eagle3", {"layers": (1, 5, 7)}),
    ("llama", "dspark, confidence from states alone"): (
        "llama", {}, "dspark", {"confidence_with_markov": False},
    ),
    ("llama", "dspark, a first slot without a guess"): ("llama", {}, "dspark", {"sample_from_anchor": False}),
    ("llama", "dspark, no confidence"): ("llama", {}, "dspark", {"confidence": False}),
    ("llama", "eagle3, norm before residual"): ("llama", {}, "eagle3", {"norm_before_residual": True}),
    ("llama", "eagle3, llama3"): ("llama", {"rope_parameters": LLAMA3}, "eagle3", {}),
    ("qwen3", "eagle3, linear"): ("qwen3", {"rope_parameters": LINEAR}, "eagle3", {}),
    ("qwen3", "dflash, linear"): ("qwen3", {"rope_parameters": LINEAR}, "dflash", {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "config", "algorithm", "options"), CASES.values(), ids=map(", ".join, CASES)
)
def test_texts_and_verified_guesses_are_those_of_the_reference(
    make_target, as_gguf, context, prompts, tmp_path, shape, config, algorithm, options
):
    """Guesses are compared by which of them was verified at each token, round by round."""
    target = read_target(make_target(shape, **SHAPE, **config))
    draft = draw_draft(tmp_path / "draft", target, 2, algorithm, **{**DRAFTS[algorithm], **options})
    sampling = SamplingParams(max_new_tokens=30, num_draft_tokens=3, stop_at_eos=True)
    config = LlamacppConfig(gguf=as_gguf(target.folder), **EXACT)
    answers, counted = {}, {}
    for engine in (
        LlamacppEngine.create(config, target, context),
        HfEngine.create(HfConfig(dtype="float32"), target, context),
    ):
        with engine:
            engine.load_draft(draft)
            answers[engine.name] = engine.generate(prompts, sampling)
            counted[engine.name] = engine.acceptance()
    for ours, theirs in zip(answers["hf"], answers["llamacpp"], strict=True):
        assert (theirs.token_ids, theirs.guess_depths) == (ours.token_ids, ours.guess_depths)
    difference = counted["hf"] - counted["llamacpp"]
    assert (difference.rounds, difference.drafted) == (0, 0)
    assert 0 <= difference.accepted <= 2  # llama.cpp counts no guess behind an end token
    assert counted["llamacpp"].accepted > 0


@pytest.mark.parametrize("draft_type", ["f16", "q8_0"])
def test_a_quantised_draft_changes_no_text(folder, as_gguf, context, prompts, tmp_path, draft_type):
    target = read_target(folder)
    draft = draw_draft(tmp_path / "draft", target, 2, **DRAFTS["eagle3"])
    config = LlamacppConfig(gguf=as_gguf(folder), attention="f32", draft_type=draft_type)
    sampling = SamplingParams(max_new_tokens=30)
    with LlamacppEngine.create(config, target, context) as engine:
        plain = engine.generate(prompts, sampling)
        engine.load_draft(draft)
        drafted = engine.generate(prompts, SamplingParams(max_new_tokens=30, num_draft_tokens=3))
        assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        assert engine.acceptance().accepted > 0


def draw_norms(file: Path) -> None:
    """Give each norm of a draft other weights."""
    draw, tensors = torch.Generator().manual_seed(0), load_file(file)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor.normal_(std=0.5, generator=draw)
    save_file(tensors, file, metadata={"format": "pt"})


def test_an_mtp_head_guesses_as_our_proposer_does(make_target, as_gguf, context, prompts, tmp_path):
    """Each server answers one prompt: in later ones, llama.cpp's head reads an older answer's state before the first
    token, and in the first one zeros."""
    target = read_target(make_target("qwen3_5_text", **SHAPE, **RECURRENT))
    draft, reference = draw_draft(tmp_path / "draft", target, 2, "mtp"), TransformersTarget(target.folder)
    draw_norms(draft / "model.safetensors")
    config = LlamacppConfig(gguf=as_gguf(target.folder), **EXACT)
    with LlamacppEngine.create(config, target, context) as engine:
        plain = engine.generate(prompts[:4], SamplingParams(max_new_tokens=40))
        for prompt, expected in zip(prompts, plain, strict=False):
            engine.load_draft(draft)
            (answer,) = engine.generate([prompt], SamplingParams(max_new_tokens=40, num_draft_tokens=3))
            assert answer.token_ids == expected.token_ids
            tokens = [*prompt, *answer.token_ids]
            states = reference.hidden(tokens)
            replay = Replay(target.folder, draft, len(prompt), tokens, states, first_without_state=True)
            assert list(answer.guess_depths) == replay.depths(3, answer.guess_depths)
        assert engine.acceptance().accepted > 0
