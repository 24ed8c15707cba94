"""The heads of Qwen3.5 MoE, DeepSeek V3 and GLM written as plainly as possible: one token and one expert at a time.

Weights have the names of the targets' files, and ``fields`` is the target's config.json. Imports nothing of the
project; slow on purpose."""

from typing import Any

import torch
from torch import Tensor

from .dense_reference import Document, Setting, rms

Weights = dict[str, Tensor]


class Head:
    """A head, and the keys and values of the steps of one document so far."""

    def __init__(self, weights: Weights, fields: dict[str, Any]) -> None:
        self.weights, self.fields = weights, fields
        self.is_qwen = "num_experts" in fields
        layers = fields["num_hidden_layers"]
        self.layer = "mtp.layers.0." if self.is_qwen else f"model.layers.{layers}."
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def product(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{self.layer}{name}.weight"].T
        return (
            y + self.weights[f"{self.layer}{name}.bias"] if f"{self.layer}{name}.bias" in self.weights else y
        )

    def normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return rms(x, 1 + weight if self.is_qwen else weight, self.fields["rms_norm_eps"])

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, channels]: the rotated channels come first."""
        share = self.fields["rope_parameters"].get("partial_rotary_factor", 1.0)
        width = int(x.shape[-1] * share)
        theta = self.fields["rope_parameters"]["rope_theta"]
        frequency = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
        angle = (positions.double()[:, None] * frequency.double())[:, None]
        # Latent attention rotates neighbouring channels, the others rotate channels half the width apart.
        pairs = [slice(0, width, 2), slice(1, width, 2)]
        if "kv_lora_rank" not in self.fields:
            pairs = [slice(0, width // 2), slice(width // 2, width)]
        first, second = (x[..., pair] for pair in pairs)
        turned = x.clone()
        turned[..., pairs[0]] = first * angle.cos() - second * angle.sin()
        turned[..., pairs[1]] = second * angle.cos() + first * angle.sin()
        return turned

    def attention(self, x: Tensor, positions: Tensor) -> Tensor:
        fields, count = self.fields, len(x)
        heads = fields["num_attention_heads"]
        gate = None
        if "kv_lora_rank" in fields:
            nope, rope, latent = (
                fields[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
            )
            low = self.normed(self.product(x, "self_attn.q_a_proj"), f"{self.layer}self_attn.q_a_layernorm")
            q = self.product(low, "self_attn.q_b_proj").view(count, heads, nope + rope)
            both = self.product(x, "self_attn.kv_a_proj_with_mqa")
            low = self.normed(both[:, :latent], f"{self.layer}self_attn.kv_a_layernorm")
            kv = self.product(low, "self_attn.kv_b_proj").view(count, heads, nope + fields["v_head_dim"])
            shared = self.turned(both[:, None, latent:], positions).expand(count, heads, rope)
            q = torch.cat([q[..., :nope], self.turned(q[..., nope:], positions)], -1)
            k, v = torch.cat([kv[..., :nope], shared], -1), kv[..., nope:]
        else:
            d = fields["head_dim"]
            q, k, v = (self.product(x, f"self_attn.{name}_proj").view(count, -1, d) for name in "qkv")
            if self.is_qwen:
                q, gate = q.view(count, heads, 2, d).unbind(2)
            if f"{self.layer}self_attn.q_norm.weight" in self.weights:
                q, k = (
                    self.normed(part, f"{self.layer}self_attn.{name}_norm")
                    for part, name in ((q, "q"), (k, "k"))
                )
            q, k = self.turned(q, positions), self.turned(k, positions)
        self.keys.append(k)
        self.values.append(v)
        group = heads // k.shape[1]
        rows: list[Tensor] = []
        for t in range(count):
            # Keys of step 0 up to the row, and of each later step the row's own.
            seen = [
                torch.cat([part[0][: t + 1], *(own[t : t + 1] for own in part[1:])])
                for part in (self.keys, self.values)
            ]
            keys, values = (part.repeat_interleave(group, 1) for part in seen)
            scores = torch.einsum("hd,uhd->hu", q[t], keys) / q.shape[-1] ** 0.5
            rows.append(torch.einsum("hu,uhd->hd", scores.softmax(-1), values))
        attended = torch.stack(rows)
        if gate is not None:
            attended = attended / (1 + torch.exp(-gate))
        return self.product(attended.flatten(1), "self_attn.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        inner = torch.nn.functional.silu(self.product(x, f"mlp.{name}.gate_proj"))
        return self.product(inner * self.product(x, f"mlp.{name}.up_proj"), f"mlp.{name}.down_proj")

    def chosen(self, scores: Tensor) -> list[int]:
        """The experts of one token: the best by corrected score, of the best groups by their best two."""
        fields = self.fields
        if self.is_qwen:
            order = scores.tolist()
            candidates = range(len(order))
        else:
            bias = self.weights[f"{self.layer}mlp.gate.e_score_correction_bias"]
            order = (scores + bias).tolist()
            size = len(order) // fields["n_group"]
            groups = [list(range(first, first + size)) for first in range(0, len(order), size)]
            groups.sort(key=lambda group: -sum(sorted((order[i] for i in group), reverse=True)[:2]))
            candidates = [i for group in groups[: fields["topk_group"]] for i in group]
        return sorted(candidates, key=lambda i: -order[i])[: fields["num_experts_per_tok"]]

    def experts(self, x: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for token in x:
            logits = self.product(token, "mlp.gate")
            scores = logits.softmax(-1) if self.is_qwen else 1 / (1 + torch.exp(-logits))
            chosen = self.chosen(scores.detach())
            total = sum(scores[i] for i in chosen)
            scale = 1.0 if self.is_qwen else self.fields["routed_scaling_factor"]
            rows.append(sum(scale * scores[i] / total * self.mlp(token, f"experts.{i}") for i in chosen))
        routed = torch.stack(rows)
        if self.is_qwen:
            gate = 1 / (1 + torch.exp(-self.product(x, "mlp.shared_expert_gate")))
            return routed + gate * self.mlp(x, "shared_expert")
        return routed + self.mlp(x, "shared_experts")

    def step(self, embedded: Tensor, state: Tensor, positions: Tensor) -> Tensor:
        """The state behind the head's last norm, from the embeddings and the states of one step."""
        if self.is_qwen:
            names = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"]
        else:
            names = [self.layer + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
            embedded = embedded * (positions > 0)[:, None]
        both = torch.cat([self.normed(embedded, names[0]), self.normed(state, names[1])], -1)
        y = both @ self.weights[f"{names[2]}.weight"].T
        y = y + self.attention(self.normed(y, f"{self.layer}input_layernorm"), positions)
        y = y + self.experts(self.normed(y, f"{self.layer}post_attention_layernorm"))
        return self.normed(y, names[3])


def expert_inputs(
    weights: Weights, document: Document, setting: Setting, fields: dict[str, Any]
) -> list[Tensor]:
    """S tensors [T, H], as ``dense_reference.head_inputs``."""
    head, num_tokens = Head(weights, fields), len(document.ids)
    time, outputs = torch.arange(num_tokens), list[torch.Tensor]()
    state = rms(document.states, setting.target_norm, setting.eps)
    for step in range(setting.steps):
        token = setting.embedding[document.ids[torch.clamp(time + 1 + step, max=num_tokens - 1)]]
        state = head.step(token, state, time + step)
        outputs.append(state)
    return outputs
