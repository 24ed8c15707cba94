"""Any tensor of the target is at hand for a draft that names it: a draft of the multi-token-prediction kind."""

import pytest
import torch
from safetensors.torch import load_file

from spec_core.errors import TargetError
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.targets.target_reader import check_target_tensors, read_target, read_target_tensors
from spec_testing import DraftSuite
from spec_testing.draft_workbench import build
from spec_testing.toy_target import toy_target

LAST_MLP = "model.layers.7.mlp.up_proj.weight"
LAST_NORM = "model.layers.7.input_layernorm.weight"


class InheritingDraft(Eagle3Draft):
    """Starts its MLP as the target's last one, and keeps one of its norms as it is."""

    def target_tensors(self, target):
        return (LAST_MLP, LAST_NORM)

    def build(self, target, tensors, token_counts, *kernel):
        module = super().build(target, tensors, token_counts, *kernel)
        module.register_buffer("last_norm", tensors.others[LAST_NORM].clone(), persistent=False)
        if self.config.init_from is None:
            module.load_state_dict({"midlayer.mlp.up_proj.weight": tensors.others[LAST_MLP]}, strict=False)
        return module


def toy_others(target):
    generator = torch.Generator().manual_seed(5)
    shape = target.intermediate_size, target.hidden_size
    mlp = 0.1 * torch.randn(shape, generator=generator)
    return {LAST_MLP: mlp, LAST_NORM: torch.rand(target.hidden_size, generator=generator)}


def test_the_suite_gives_a_draft_what_it_names(tmp_path):
    target, draft = toy_target(tmp_path), InheritingDraft(Eagle3Draft.Config(name="eagle3", num_steps=2))
    bench = build(draft, target, others=toy_others(target) | {"another": torch.ones(1)})
    assert set(bench.tensors.others) == {LAST_MLP, LAST_NORM}
    DraftSuite().test_d11_the_targets_tensors_stay_the_targets(bench)
    bench.module.last_norm += 1
    with pytest.raises(AssertionError, match="last_norm is no tensor of the target"):
        DraftSuite().test_d11_the_targets_tensors_stay_the_targets(bench)


def test_tensors_of_the_folder_are_read_by_name(tiny_llama):
    target = read_target(tiny_llama)
    others, stored = read_target_tensors(target).others, load_file(tiny_llama / "model.safetensors")
    assert set(others) == set(stored)
    assert len(others) == len(stored)
    assert torch.equal(others[LAST_MLP], stored[LAST_MLP])


def test_a_draft_starts_from_them_and_keeps_them_out_of_its_state(tiny_llama):
    target, draft = read_target(tiny_llama), InheritingDraft(Eagle3Draft.Config(name="eagle3"))
    tensors = read_target_tensors(target)
    module = draft.build(target, tensors, None)
    assert torch.equal(module.midlayer.mlp.up_proj.weight, tensors.others[LAST_MLP])
    assert torch.equal(module.last_norm, tensors.others[LAST_NORM])
    assert "last_norm" not in module.state_dict()
    assert "last_norm" not in dict(draft.exported_tensors(module.state_dict(), target))


def test_a_tensor_that_the_target_lacks_is_refused_in_one_line(tiny_llama):
    target = read_target(tiny_llama)
    check_target_tensors(target, (LAST_MLP, LAST_NORM))
    with pytest.raises(TargetError, match=r"no tensor model.layers.61.eh_proj.weight, which the draft reads"):
        check_target_tensors(target, (LAST_MLP, "model.layers.61.eh_proj.weight"))
