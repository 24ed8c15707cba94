"""A type that a third party's distribution adds is read as transformers' own code computes it."""

import sys

import pytest
import torch
import transformers

from spec_core.errors import TargetError
from spec_kit.targets import read_target, read_target_tensors

from ....distributions import write_distribution

RECURRENT_GEMMA = """
from spec_core import TargetType

TYPE = TargetType(
    norm="rms_plus_one",
    {norm_tensor}
    embedding_scale=lambda values: values.integer("hidden_size") ** 0.5,
    logit_softcap=lambda values: values.positive("logits_soft_cap"),
    partial=0.5,
)
"""
IDS = torch.arange(3, 20)


@pytest.fixture
def add_type(tmp_path, monkeypatch):
    """``add_type(norm_tensor)``: installs a distribution that adds the type ``recurrent_gemma``."""

    def add(norm_tensor: str = "") -> None:
        points = "[spec_core.target_types]\nrecurrent_gemma = spec_recurrent:TYPE\n"
        site = write_distribution(tmp_path / "site", "spec-recurrent", points)
        (site / "spec_recurrent.py").write_text(RECURRENT_GEMMA.format(norm_tensor=norm_tensor))
        monkeypatch.delitem(sys.modules, "spec_recurrent", raising=False)
        monkeypatch.syspath_prepend(site)

    return add


@pytest.fixture
def model(tmp_path):
    """A small random model, which is saved, too; no weight of its final norm is 0."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "recurrent_gemma", hidden_size=16, lru_width=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=48, vocab_size=61, logits_soft_cap=2.0,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.model.final_norm.weight)
    model.save_pretrained(tmp_path)
    return model


@torch.no_grad()
def test_a_final_norm_is_read_under_the_name_that_the_type_gives(add_type, model, tmp_path):
    add_type('norm_tensor="final_norm.weight",')
    target = read_target(tmp_path)
    assert target.norm_name == "model.final_norm.weight"
    tensors, states = read_target_tensors(target), []
    model.model.final_norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    logits_TV = model(IDS[None], use_cache=False).logits[0]
    normed_TH = torch.nn.functional.rms_norm(states[0], (16,), tensors.norm_H, target.norm_eps)
    cap = target.logit_softcap
    torch.testing.assert_close(cap * torch.tanh(normed_TH @ tensors.head_VH.T / cap), logits_TV)


def test_without_that_name_the_usual_ones_are_looked_for_and_named(add_type, model, tmp_path):
    add_type()
    with pytest.raises(
        TargetError, match=r"holds no final norm; looked for model\.norm\.weight, model\.ln_f\.weight, "
    ):
        read_target(tmp_path)
