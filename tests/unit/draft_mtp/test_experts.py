"""Heads with experts: loss and every gradient against a dense reference in float64, and layers of Transformers."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm_lite
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_draft_mtp.stored_head import stored_parts
from spec_kit.layers import rotate

from ...mtp_targets import CONSTANT, COPIES, KINDS, random_head, write_config, write_head
from ..draft_batches import YARN
from ..draft_parts import assert_gradients
from .cases import LENGTHS, ROPES, random_documents, run, setting_of, shipped, target_and_tensors
from .dense_reference import dense_mtp
from .expert_reference import expert_inputs

LATENT_YARN = {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


def stored_gradients(module, target):
    """The gradients under the names of the target's files."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    layer = target.num_layers if module.shape.stored_as_layer else None
    return {name: place.view(gradients[place.name]) for name, place in stored_parts(gradients, layer)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", [no_kernel, KERNELS.get], ids=["plain", "kernel"])
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "computed again"])
def test_loss_and_every_gradient_equal_the_dense_reference(recompute, kernel, kind, tmp_path):
    draft, target, tensors, fields = shipped(tmp_path, kind, num_steps=3, checkpoint_activations=recompute)
    module, documents = draft.build(target, tensors, None, kernel).double(), random_documents(target, LENGTHS)
    output, counts = run(module, draft, documents, target, tensors)
    output.loss.backward()
    stored = load_file(tmp_path / "model.safetensors")
    weights = {name: weight.double().requires_grad_() for name, weight in stored.items()}
    setting = setting_of(module, target, tensors)
    loss, labelled = dense_mtp(weights, documents, setting, functools.partial(expert_inputs, fields=fields))
    loss.backward()
    assert loss.item() > 0.1
    assert counts.tolist() == labelled
    assert abs(output.loss.item() - loss.item()) <= 1e-9 * loss.item()
    gradients = stored_gradients(module, target)
    constants = {name for name in weights if name.endswith((CONSTANT, *COPIES))}
    assert gradients.keys() == weights.keys() - constants
    expected = {
        name: torch.zeros_like(weights[name]) if weights[name].grad is None else weights[name].grad
        for name in gradients
    }
    assert_gradients(gradients, expected, 1e-9)


LAYERS = {
    "qwen3_5_moe": (qwen.Qwen3_5MoeDecoderLayer, qwen.Qwen3_5MoeTextRotaryEmbedding),
    "deepseek_v3": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RotaryEmbedding),
    "glm4_moe": (glm.Glm4MoeDecoderLayer, glm.Glm4MoeRotaryEmbedding),
    "glm4_moe_lite": (glm_lite.Glm4MoeLiteDecoderLayer, glm_lite.Glm4MoeLiteRotaryEmbedding),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_and_its_gradients_equal_transformers(kind, tmp_path):
    """Attention, routing and experts of one pass: the names, the output, and the gradient of every weight."""
    target, tensors = target_and_tensors(
        tmp_path, rope=LATENT_YARN if "kv_lora_rank" in KINDS[kind] else ROPES[kind]
    )
    fields = write_config(kind, target)
    write_head(tmp_path, random_head(fields))
    module = MtpDraft(MtpConfig(init_from=tmp_path)).build(target, tensors, None)
    ours = module.mtp.layer
    decoder, rotary = LAYERS[kind]
    config = CONFIG_MAPPING[fields["model_type"]](
        **{key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
        | {"layer_types": ["full_attention"] * target.num_layers, "attn_implementation": "eager"}
    )
    config._experts_implementation = "eager"
    theirs = decoder(config, target.num_layers - 1)
    theirs.load_state_dict(ours.state_dict())
    x_TH = torch.randn(13, target.hidden_size, generator=torch.Generator().manual_seed(3))
    position = torch.arange(13)
    mask = torch.full((13, 13), -torch.inf).triu(1)[None, None]
    axes = position.expand(3, 1, -1) if kind.startswith("qwen3_5") else position[None]  # time, height, width
    angles = rotary(config)(x_TH[None], axes)
    expected = theirs(x_TH[None], position_embeddings=angles, attention_mask=mask)
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(x_TH.shape)
    own = module.rope.angles(position, torch.float32)
    q, k, v, *rest = ours.qkv(x_TH, lambda heads: rotate(heads, own))
    heads = (part.transpose(0, 1)[None] for part in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    got = ours.finish(x_TH, attended[0].transpose(0, 1), *rest)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(4))
    for output in (got, expected):
        (output * weight).sum().backward()
    gradients = dict(theirs.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == gradients.keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5)


def test_the_constant_of_the_router_keeps_float32(tmp_path):
    """Constants near 10 would be up to 0.03 off in bfloat16, and other experts would be chosen."""
    draft, target, tensors, _ = shipped(tmp_path, "deepseek_v3")
    module = draft.build(target, tensors, None).to(torch.bfloat16)
    assert module.mtp.fc.weight.dtype == torch.bfloat16
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if name.endswith(CONSTANT))
    assert torch.equal(module.state_dict()[f"mtp.layers.0.mlp.gate.{CONSTANT}"], stored[name])
    assert name not in dict(module.named_parameters())
