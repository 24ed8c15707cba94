"""vLLM serves drafts whose layers' matrices were exported in 8 bits."""

import shutil

import pytest
import torch

from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.drafting import recognise
from spec_kit.drafting.quantised_draft import quantise_folder
from spec_kit.targets.target_reader import read_target

from ..quantised_targets import write_dequantised
from .conftest import NUM_DRAFT_TOKENS
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts"), pytest.mark.timeout(900)]

SAMPLING = SamplingParams(max_new_tokens=40, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("eagle3", "int8"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("eagle3", "fp8"), ("dflash", "int8"), ("dflash", "fp8"), ("peagle", "int8"))
        ),
    ],
)
def test_the_acceptance_of_a_quantised_draft_is_that_of_its_dequantised_weights(
    llama, trained_draft, sharing_engine, vllm_context, tmp_path, name, dtype
) -> None:
    """Texts stay the target's, and the draft guesses as before: engines that misread one accept nothing."""
    if dtype == "int8" and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's products in int8 on processors with AMX take no float32")
    trained, target = trained_draft(name), read_target(llama)
    quantised = shutil.copytree(trained.folder, tmp_path / "quantised")
    quantise_folder(quantised, type(recognise(trained.folder, target)).quantised_modules, dtype)
    dequantised = write_dequantised(quantised, tmp_path / "dequantised")
    served = sharing_engine(llama)
    texts, lengths = [], []
    with HfEngine.create(HfConfig(), target, vllm_context) as reference:
        for engine, folder in ((served, quantised), (reference, dequantised), (reference, trained.folder)):
            engine.load_draft(folder)
            texts.append([answer.token_ids for answer in engine.generate(trained.prompts, SAMPLING)])
            lengths.append(engine.acceptance().acceptance_length)
    assert texts.count(texts[0]) == len(texts)
    assert lengths == pytest.approx(lengths[:1] * 3, rel=0.02)
    assert lengths[0] > 1.2
