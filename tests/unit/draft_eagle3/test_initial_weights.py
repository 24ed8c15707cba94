"""Initial weights of a fresh draft's matrices, at any width."""

import math

import pytest
import torch

from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..draft_parts import make_target, make_tensors


def build(seed=0, **options):
    target = make_target()
    torch.manual_seed(seed)
    return Eagle3Draft(Eagle3Config(**options)).build(target, make_tensors(target), None)


@pytest.mark.parametrize("width", [40, 640])
def test_matrices_start_in_proportion_to_their_inputs(width):
    module = build(intermediate_size=width, num_heads=width // 4, num_kv_heads=width // 4, head_dim=4)
    matrices = {name: weight for name, weight in module.named_parameters() if weight.ndim == 2}
    del matrices["lm_head.weight"]
    for name, weight in matrices.items():
        expected = (0.1 if name == "fc.weight" else 0.5) / math.sqrt(weight.shape[1])
        assert weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * weight.numel())), name


def test_the_layer_outvotes_the_residual_that_it_starts_from():
    module = build()
    features_TNH = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(1))
    fused_TH = module.fuse(features_TNH)
    attended = module.midlayer.self_attn.v_proj(torch.cat([module.midlayer.hidden_norm(fused_TH)] * 2, dim=1))
    heads = attended.unflatten(1, (-1, module.shape.head_dim))
    group = module.shape.num_heads // module.shape.num_kv_heads
    added_TH = module.midlayer.finish(fused_TH, heads.repeat_interleave(group, 1)) - fused_TH
    assert fused_TH.norm() < 0.5 * added_TH.norm()


def test_the_seed_decides():
    first, again, other = build(seed=1), build(seed=1), build(seed=2)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
