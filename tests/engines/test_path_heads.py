"""The engines' own path heads of LiLiCorr read our exports, and score as ours does. No engine is started."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft
from spec_engine_vllm.engine import VllmEngine
from spec_kit.targets import read_target, read_target_tensors
from spec_trainer.cli.commands.evaluate import export_untrained

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("states")]

LOAD = """
import json, sys, tempfile, torch
from pathlib import Path
from types import SimpleNamespace
from safetensors.torch import load_file, save_file

def folders():
    for folder in map(Path, sys.argv[1:]):
        fields = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors").items()
        own = {name.removeprefix("lilicorr."): value for name, value in weights if name.startswith("lilicorr.")}
        sizes = {"model_hidden_size": fields["hidden_size"], "block_size": fields["block_size"],
                 "rms_norm_eps": fields["rms_norm_eps"]}
        yield folder, fields, own, sizes

def write(folder, start, steps):
    save_file({"start": start.contiguous(), "steps": steps.contiguous()}, folder / "scores.safetensors")
"""
SGLANG = (
    LOAD
    + """
from sglang.srt.models.lilicorr import LiLiCorrHead, check_head_weight_coverage
from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config

for folder, fields, own, sizes in folders():
    given = load_file(folder / "given.safetensors")
    config = parse_lilicorr_draft_config(draft_hf_config=SimpleNamespace(**fields))
    head = LiLiCorrHead(**sizes, config=config).float()
    check_head_weight_coverage(head, {f"lilicorr.{name}" for name in own})
    head.load_state_dict(own)
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    head.set_active_block_size(given["candidate_log_probs"].shape[1] + 1)
    with torch.no_grad():
        scores = head.score(**{name: value.unsqueeze(1) for name, value in given.items()})
    write(folder, *(part.squeeze(1) for part in head.log_factors(*scores)))
"""
)
VLLM = (
    LOAD
    + """
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.lilicorr import LiLiCorrHead
from vllm.model_executor.models.utils import AutoWeightsLoader

with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
    initialize_model_parallel()
    for folder, fields, own, sizes in folders():
        head = LiLiCorrHead(**sizes, config=fields["dflash_config"]).float()
        assert AutoWeightsLoader(head).load_weights(own.items()) == dict(head.named_parameters()).keys() == own.keys()
        head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
        for module in head.modules():
            if method := getattr(module, "quant_method", None):
                method.process_weights_after_loading(module)
        with torch.no_grad():
            scores = head(**load_file(folder / "given.safetensors"))
        write(folder, scores[:, 0, 0], scores[:, 1:])
"""
)
WIDTHS = (64, 32)
"""Widths of the heads; the draft's is 64."""


def assert_scores_alike(script, target, folder):
    """Blocks of two guesses of drafts that were trained with three, one of them without an anchor."""
    expected = {}
    for width in WIDTHS:
        torch.manual_seed(0)
        options = {"block_size": 4, "num_layers": 1, "lilicorr_hidden_size": width}
        made = LiLiCorrDraft(LiLiCorrDraft.Config(name="lilicorr", **options))
        exported = export_untrained(made, target, folder / f"draft-{width}")
        weights = load_file(exported / "model.safetensors")
        for name, weight in weights.items():
            if name.startswith("lilicorr."):
                weight += 0.2 * torch.randn_like(weight)
        save_file(weights, exported / "model.safetensors")
        module = LiLiCorrDraft.from_folder(exported).build(target, read_target_tensors(target), None)
        log_probs = torch.randn(5, 2, 50).log_softmax(-1).topk(module.shape.num_candidates).values
        given = {
            "token_embeddings": torch.randn(*log_probs.shape, 64),
            "candidate_log_probs": log_probs,
            "pass_hidden": torch.randn(5, 2, 64),
            "anchor_hidden": torch.randn(5, 64),
            "anchor_valid": torch.tensor([True, True, False, True, True]),
        }
        save_file(given, exported / "given.safetensors")
        with torch.no_grad():
            expected[exported] = module.lilicorr(*given.values())
    child = subprocess.run(
        [sys.executable, "-c", script, *map(str, expected)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    for exported, (start, steps) in expected.items():
        assert steps.std() > 0.3
        scores = load_file(exported / "scores.safetensors")
        torch.testing.assert_close((scores["start"], scores["steps"]), (start, steps), rtol=1e-4, atol=1e-4)


@pytest.fixture
def target(make_target):
    return read_target(make_target("qwen3", hidden_size=64))


def test_vllms_path_head_scores_as_ours(target, tmp_path):
    if not VllmEngine.probe().versions:
        pytest.skip("vLLM is not installed")
    assert_scores_alike(VLLM, target, tmp_path)


def test_sglangs_path_head_scores_as_ours(target, tmp_path, request):
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pytest.skip("SGLang is not installed")
    request.getfixturevalue("sglang_environment")
    assert_scores_alike(SGLANG, target, tmp_path)
