"""Targets, trained drafts and shared vLLM processes for the tests with the real vLLM."""

import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.hosting import SubprocessEngine
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.app import run

from ..distributions import write_distribution
from ..made_once import made_once
from .forked_starts import forked_starts
from .sharing import Pool, sharing
from .trained_drafts import DRAFTS, Trained, write_answers

MAX_LENGTH = 200
BATCH_TOKENS = 64
"""Longer prompts run in chunks."""
NUM_DRAFT_TOKENS = 3
VLLM_ARGS = {"distributed_executor_backend": "uni"}
"""One process less to start for each vLLM; a processor build wants the variable below for it."""
_SHAPE = {"hidden_size": 64, "head_dim": 32, "initializer_range": 0.25}
"""vLLM's attention on a processor takes heads of 32 and more."""
_LATENT = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 8,
    "initializer_range": 0.25,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
"""DeepSeek V3 with dense layers alone; vLLM's latent attention on a processor takes a cache of 512 + 64 channels."""
_WITHOUT_STATES = {**_SHAPE, "intermediate_size": 256, "layer_types": ["full_attention"] * 8}
"""Qwen3.5 without recurrent layers, which vLLM has on a processor in bfloat16 alone: texts would part at ties."""
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "mtp_num_hidden_layers": 1,
}
MEDUSA = Path(__file__).parents[1] / "plugins" / "spec-draft-medusa"
"""A third party's draft; its distribution is not installed here."""


@pytest.fixture(scope="session")
def llama(make_target, add_characters, tmp_path_factory) -> Path:
    def make(folder: Path) -> None:
        shutil.copytree(make_target("llama", **_SHAPE), folder, dirs_exist_ok=True)
        add_characters(folder)

    return made_once(tmp_path_factory, "llama", make)


@pytest.fixture(scope="session")
def repeating(make_target, add_characters, tmp_path_factory) -> Path:
    """A Llama whose answers repeat themselves, so that a draft learns from few of them."""

    def make(folder: Path) -> None:
        made = make_target("llama", hidden_size=64, head_dim=32, initializer_range=0.1)
        shutil.copytree(made, folder, dirs_exist_ok=True)
        add_characters(folder)

    return made_once(tmp_path_factory, "llama-that-repeats", make)


@pytest.fixture(scope="session")
def random_rows(tmp_path_factory) -> Path:
    """Random tokens: the data of the start draft, of which ``follow`` replays a share."""
    draw, file = random.Random(4), tmp_path_factory.mktemp("random") / "rows.jsonl"
    ids = [[draw.randrange(3, 97) for _ in range(44)] for _ in range(32)]
    file.write_text("".join(json.dumps({"input_ids": row, "loss_mask": [1] * 44}) + "\n" for row in ids))
    return file


@pytest.fixture(scope="session")
def untrained(repeating, random_rows, tmp_path_factory) -> Path:
    """A draft for ``repeating`` that has learnt nothing, exported by a run of one step."""
    output = tmp_path_factory.mktemp("untrained")
    words = ["--target", repeating, "--data", random_rows, "--draft", "eagle3", "--output", output / "run"]
    assert run([*map(str, words), "train.steps=1", "train.lr=1e-9", "data.eval_samples=0"]) == 0
    return output / "run" / "draft"


@pytest.fixture(scope="session")
def deepseek(make_target) -> Path:
    return make_target("deepseek_v3", **_LATENT)


@pytest.fixture(scope="session")
def qwen35(make_target) -> Path:
    return make_target("qwen3_5_text", **_WITHOUT_STATES)


@pytest.fixture(scope="session")
def experts(make_target) -> Path:
    return make_target("qwen3_5_moe_text", **_WITHOUT_STATES, **_EXPERTS)


@pytest.fixture(scope="session")
def qwen3(make_target) -> Path:
    return make_target("qwen3", tie_word_embeddings=True, **_SHAPE)


@pytest.fixture(scope="session")
def config() -> VllmConfig:
    return VllmConfig(
        name="vllm",
        batch_tokens=BATCH_TOKENS,
        max_model_len=MAX_LENGTH,
        kv_cache_bytes=64 << 20,
        args=VLLM_ARGS,
    )


@pytest.fixture(scope="session")
def vllm_context() -> EngineContext:
    return EngineContext(
        backend=CpuBackend(CpuBackend.Config()), placement="colocated", start_s=240.0, peer_s=60.0
    )


@pytest.fixture(scope="session")
def draft_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the rig notes the guesses of vLLM's draft."""
    return tmp_path_factory.mktemp("rig") / "drafts.jsonl"


@pytest.fixture(scope="session")
def vllm_environment(draft_notes: Path) -> Iterator[None]:
    """Return the environment of every vLLM that the tests start: without warm-up, with the rig."""
    rigs = [Path(__file__).parent / name for name in ("vllm_rig", "rig_streams", "rig_start")]
    points = "[vllm.general_plugins]\nspec_rig = spec_vllm_rig:install\n"
    rigs.append(write_distribution(draft_notes.parent, "spec-vllm-rig", points))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, rigs)), prepend=os.pathsep)
        patch.setenv("SPEC_TEST_DRAFTS", str(draft_notes))
        patch.setenv("SPEC_TEST_SWAPS", str(draft_notes.with_name("swaps.jsonl")))
        patch.setenv("SPEC_TEST_FORKS", "1")
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        with forked_starts():
            yield


@pytest.fixture(scope="session")
def sglang_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Return the environment of every SGLang that the tests start: with the stand-in for its kernels, and the rig."""
    folder = tmp_path_factory.mktemp("packages")
    write_distribution(folder, "torchvision", version="0.28.0")  # transformers asks for its version
    points = "[sglang.srt.plugins]\nspec_rig = spec_sglang_rig:install\n"
    write_distribution(folder, "spec-sglang-rig", points)
    here = Path(__file__).parent
    rigs = [here.parent / "rigs" / "fake_sgl_kernel", here / "rig_start", here / "sglang_rig", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, rigs)), prepend=os.pathsep)
        patch.setenv("SPEC_TEST_FORKS", "1")
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with forked_starts():
            yield


@pytest.fixture(scope="module")
def spawning(vllm_environment: None) -> Iterator[None]:
    """Have vLLM start its processes as it does without the rig: each imports vLLM anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPEC_TEST_FORKS")
        yield


@pytest.fixture(scope="session")
def pool(vllm_environment: None) -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def sharing_engine(
    pool: Pool, config: VllmConfig, vllm_context: EngineContext
) -> Iterator[Callable[..., SubprocessEngine]]:
    """``sharing_engine(target folder, context)``: an engine whose vLLM is there if another test has used it."""
    engines: list[SubprocessEngine] = []

    def make(folder: Path, context: EngineContext = vllm_context) -> SubprocessEngine:
        engine = sharing(VllmEngine, pool).create(config, read_target(folder), context)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the third party's draft found as if it were installed: sources and entry point on ``sys.path``."""
    project = tomllib.loads((MEDUSA / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["spec_core.drafts"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    site = write_distribution(
        tmp_path_factory.mktemp("medusa"), project["name"], "\n".join(["[spec_core.drafts]", *lines])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MEDUSA / "src")
        patch.syspath_prepend(site)
        yield


@pytest.fixture(scope="session")
def trained_draft(
    llama: Path,
    deepseek: Path,
    qwen35: Path,
    experts: Path,
    medusa: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Trained]:
    """``trained_draft(name)``: a draft that has learned a little of its target's own answers, exported.

    The target is the Llama, but for drafts that are for another one. One worker trains a draft for all.
    """
    targets = {"eagle3, mla": deepseek, "mtp": qwen35, "mtp, experts": experts}
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 97) for _ in range(4)] for _ in range(64)]

    def train(name: str) -> Trained:
        draft, target = name.partition(",")[0], targets.get(name, llama)
        answers = made_once(
            tmp_path_factory,
            f"answers-{target.name}",
            lambda folder: write_answers(target, prompts[::2], folder / "rows.jsonl"),
        )

        def make(output: Path) -> None:
            data = answers / "rows.jsonl"
            words = ["--target", target, "--data", data, "--draft", draft, "--output", output, *DRAFTS[name]]
            settings = ["train.warmup_steps=5", "train.global_batch_tokens=1024"]
            assert run([str(word) for word in [*words, *settings]]) == 0

        output = made_once(tmp_path_factory, f"trained-{name.replace(',', '').replace(' ', '-')}", make)
        return Trained(name, target, output / "draft", prompts)

    return train


@pytest.fixture(scope="session")
def whole_target(trained_draft: Callable[[str], Trained], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of the MTP head, with the trained head among its tensors."""
    trained = trained_draft("mtp")
    folder = shutil.copytree(trained.target, tmp_path_factory.mktemp("whole") / "target")
    tensors = load_file(folder / "model.safetensors") | load_file(trained.folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    head = json.loads((trained.folder / "config.json").read_text())
    fields |= {"architectures": head["architectures"], "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
