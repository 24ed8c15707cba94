"""vLLM captures targets that see, against Transformers driven by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spec_core import Engine, EngineContext
from spec_core.errors import EngineError
from spec_testing import EngineImagesSuite, SampleWithImages
from spec_trainer.cli.app import run

from ..image_requests import picture, question, request_of, samples_with_images
from ..integration.launching import Lab
from ..integration.run_directory import losses
from ..made_once import made_once
from ..seeing_targets import GEMMA, SEEING, save_seeing_target
from .conftest import VLLM_ARGS
from .vllm_here import needs_vllm

if TYPE_CHECKING:
    from spec_engine_vllm.config import VllmConfig

pytestmark = [*needs_vllm, pytest.mark.xdist_group("images")]

LIMIT_S = 120.0
SIZES = ((24, 24), (33, 47), (8, 90))
"""The image processor keeps the first, and scales the others."""


KINDS = [
    pytest.param(kind, marks=[] if kind in ("qwen3_vl", GEMMA) else [pytest.mark.slow])
    for kind in (*SEEING, GEMMA)
]
"""Each has a vLLM of its own, so each change has one Qwen alone."""


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return made_once(tmp_path_factory, f"seeing-{kind}", lambda to: save_seeing_target(to, kind, 64, 32))


class TestVllmEngineSees(EngineImagesSuite):
    placement = "colocated"

    @pytest.fixture
    def config(self, config: VllmConfig, seeing: Path) -> VllmConfig:
        """Blocks of 32 tokens, which Qwen3-VL's samples may share; by default, as for the others, none do."""
        shared = {"enable_prefix_caching": True} if "qwen3_vl" in seeing.name else {}
        args = config.args | {"block_size": 32} | shared
        sizes = {"kv_cache_bytes": 1 << 28} | (
            {"batch_tokens": 256, "max_model_len": 256} if GEMMA in seeing.name else {}
        )
        return config.model_copy(update={"args": args, **sizes})

    @pytest.fixture
    def new_engine(self, vllm_environment, seeing, sharing_engine) -> Callable[[EngineContext], Engine]:
        return lambda context: sharing_engine(seeing, context)

    @pytest.fixture
    def samples(self, seeing: Path) -> list[SampleWithImages]:
        """Samples without images, with one and with three; the last ones take more than a batch."""
        pictures = [[picture(size, seed) for size in SIZES] for seed in range(2)]
        return samples_with_images(
            seeing, [[], pictures[0][:1], pictures[1][:1], pictures[0], pictures[1], pictures[0]]
        )

    def test_tokens_that_vllm_would_not_run_are_refused(self, engine, schema, seeing) -> None:
        """A row that is a token short of its image is an error; no features of other tokens are sent."""
        request = request_of(seeing, [picture((24, 24))])
        ids = list(request.input_ids)
        ids.remove(engine.target.image_token_id)
        refused = engine.capture([replace(request, input_ids=tuple(ids))], schema)
        with pytest.raises(EngineError, match=r"vLLM ran \d+ tokens for a sample with images, expected \d+"):
            refused.result(LIMIT_S)
        engine.capture([request], schema).result(LIMIT_S)


@pytest.mark.slow
def test_a_run_on_pictures_does_what_one_with_the_reference_engine_does(
    vllm_environment, tmp_path_factory, tmp_path
) -> None:
    target = made_once(
        tmp_path_factory, "seeing-qwen3_vl", lambda to: save_seeing_target(to, "qwen3_vl", 64, 32)
    )
    rows = []
    for number in range(12):
        pictures = [picture(SIZES[index], number) for index in range(number % 3)]
        answer = {"role": "assistant", "content": f"A picture, number {number}."}
        rows.append({"messages": [question("What is seen?", pictures), answer]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "target": target, "data.path": tmp_path / "rows.jsonl", "data.eval_samples": 0, "train.steps": 6,
        "train.warmup_steps": 1, "train.global_batch_tokens": 200, "draft.num_steps": 2,
    }  # fmt: skip
    vllm = {"engine__name": "vllm", "engine__batch_tokens": 256, "engine__kv_cache_bytes": 64 << 20}
    vllm |= {f"engine__args__{key}": value for key, value in VLLM_ARGS.items()}
    with Lab(tmp_path, keys, "") as lab:
        lab.train(tmp_path / "vllm", timeout_s=2 * LIMIT_S, **vllm)
        lab.train_here(tmp_path / "hf")
    assert len(losses(tmp_path / "vllm")) == 6
    assert losses(tmp_path / "vllm") == pytest.approx(losses(tmp_path / "hf"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_regenerate_gives_the_answers_that_the_reference_engine_gives(
    vllm_environment, tmp_path_factory, tmp_path, kind
) -> None:
    target = made_once(tmp_path_factory, f"seeing-{kind}", lambda to: save_seeing_target(to, kind, 64, 32))
    rows = []
    for number in range(9):
        pictures = [picture(SIZES[index], number) for index in range(number % 3)]
        rows.append({"id": str(number), "messages": [question(f"What is {number}?", pictures)]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["regenerate", "--target", target, "--data", tmp_path / "rows.jsonl", "--temperature", "0"]
    vllm = ["--engine", "vllm", "engine.dtype=float32", f"engine.kv_cache_bytes={64 << 20}"]
    vllm += [f"engine.args.{key}={json.dumps(value)}" for key, value in VLLM_ARGS.items()]
    answered = {}
    for name, more in {"vllm": vllm, "hf": []}.items():
        output = tmp_path / f"{name}.jsonl"
        line = [*words, "--output", output, "--max-new-tokens", "24", *more]
        assert run([str(word) for word in line]) == 0
        answered[name] = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in answered["vllm"]] == [row["id"] for row in rows]
    assert [len(row.get("images", ())) for row in answered["vllm"]] == [number % 3 for number in range(9)]
    assert answered["vllm"] == answered["hf"]
