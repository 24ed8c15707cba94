"""Eagle3's training step of NVIDIA's Model-Optimizer, which ``trainer_step`` compares ours with.

Its offline step: draft and loss of ``modelopt.torch.speculative`` on given hidden states, with the target's
embedding, norm and head, and without its layers. The draft keeps its parameters in the compute dtype, and AdamW
updates them there, without float32 masters. From equal weights the cross-entropies on labelled rows are ours, but
for the epsilon of norms; it takes the label of a row one token earlier, and also trains rows whose best token has
no row in the draft's head.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from spec_core import OptimizerConfig, TargetSpec, TargetTensors


class ModeloptEagle3:
    """The step. ``module``: our draft, from whose weights it begins."""

    def __init__(
        self, target: TargetSpec, tensors: TargetTensors, module: nn.Module, num_steps: int, is_compiled: bool
    ) -> None:
        """Build the target without layers, and the draft."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        ids_V = cast("Tensor", module.ids_V)
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # it prints what it finds
            warnings.simplefilter("ignore")  # of the version of transformers, and of what is not installed
            self._model = _convert(_bare_target(target, tensors), target, len(ids_V), num_steps, is_compiled)
        draft = self._model.eagle_module
        weights = {name.replace("midlayer.", "layers.0."): p for name, p in module.named_parameters()}
        weights["d2t"] = ids_V - torch.arange(len(ids_V), device=ids_V.device)
        draft.load_state_dict(weights)
        # It would make it with an argument that later versions of transformers do not take.
        draft.rotary_emb = LlamaRotaryEmbedding(draft.config).to(ids_V.device)
        self._model.train()
        self.parameters = [p for p in self._model.parameters() if p.requires_grad]

    def loss(self, ids_BT: Tensor, hidden_BTNH: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the sum over steps of decay^s · mean cross-entropy against the target's probabilities."""
        outputs = {
            "base_model_hidden_states": hidden_BTNH[:, :, -1],
            "base_hidden_prenorm": True,
            "aux_hidden_states": hidden_BTNH[:, :, :-1].flatten(2),
        }
        return self._model(input_ids=ids_BT, loss_mask=mask_BT, base_model_outputs=outputs).loss

    def optimizer(self, options: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
        """Return the optimizer of its parameters."""
        return torch.optim.AdamW(
            self.parameters, lr, options.betas, options.eps, options.weight_decay, fused=True
        )


def _bare_target(target: TargetSpec, tensors: TargetTensors) -> nn.Module:
    """Return a Llama with one layer, which is thrown away, around the target's frozen tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_positions,
        dtype=target.dtype,
    )
    with tensors.head_VH.device:
        model = LlamaForCausalLM(config).to(tensors.head_VH.dtype)
    model.model.embed_tokens.weight.data = tensors.embedding_VH
    model.model.norm.weight.data = tensors.norm_H
    model.lm_head.weight.data = tensors.head_VH
    return model


def _convert(
    model: nn.Module, target: TargetSpec, draft_vocab_size: int, num_steps: int, is_compiled: bool
) -> nn.Module:
    from modelopt.torch import speculative

    architecture = {
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "draft_vocab_size": draft_vocab_size,
        "use_last_layernorm": True,
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 17, 32],
    }
    options = {
        "eagle_offline": True,
        "eagle_ttt_steps": num_steps,
        "eagle_use_torch_compile": is_compiled,
        "eagle_architecture_config": architecture,
    }
    return speculative.convert(model, [("eagle", options)])
