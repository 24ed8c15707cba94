"""Eagle3's step written as plainly as possible from the maths: one document at a time, explicit masks over all
(s + 1) · T keys, full logits, gradients by autograd alone. Imports nothing of the project; slow on purpose."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..dense_parts import Document, TargetSetting, attend, mlp, rms, rope, row_loss, weights_of


@dataclass
class Latent:
    """Sizes of multi-head latent attention, and the factor on its scores beside 1 / √(nope + rope)."""

    kv_rank: int
    nope: int
    rope: int
    value: int
    score_scale: float


@dataclass(kw_only=True)
class Setting(TargetSetting):
    """Everything besides the draft's weights and the documents."""

    kept: list[int]  # ids of the draft's vocabulary
    num_steps: int = 7
    decay: float = 0.8
    loss: str = "ce"
    opd: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    num_layers: int = 1
    window: int | None = None  # positions that a query sees, its own included
    latent: Latent | None = None  # None: grouped queries
    image: int | None = (
        None  # a token whose embedding is its state 0, which is not fused; None: no such token
    )


def is_labelled(document: Document, t: int, s: int) -> bool:
    if t + 2 + s >= len(document.ids) or not document.mask[t + 2 + s]:
        return False
    if document.rounds is None:
        return True
    # Guess s + 1 of a round that began at token t + 1: accepted, or the first that was not.
    return s < min(document.rounds.get(t + 1, -1) + 1, document.proposed)


def is_refused(document: Document, t: int, s: int) -> bool:
    """Whether the target refused guess s + 1 of the round that began at token t + 1; a last token was not."""
    accepted = (document.rounds or {}).get(t + 1)
    return accepted == s and t + 3 + s < len(document.ids)


@dataclass
class Result:
    loss: Tensor
    counted: list[int] = field(default_factory=list)  # per step
    agreed: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    step_loss: list[float] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)  # the target's probability of the draft's best guess
    chain_sum: float = 0.0  # Σ over rows labelled at step 0 of 1 + length of the agreeing prefix
    chain_sum_t1: float = (
        0.0  # the same of 1 + expected number of best guesses that the target accepts at T 1
    )
    chain_sum_data: float = 0.0  # the same of 1 + number of best guesses that the data go on with
    refused: list[int] | None = None  # per step, with Draft-OPD

    @property
    def denominators(self) -> list[int]:
        if self.refused is None:
            return self.counted
        return [a - b for a, b in zip(self.counted, self.refused, strict=True)] + self.refused


def hidden_states(weights: dict[str, Tensor], document: Document, setting: Setting) -> list[Tensor]:
    """Input of the head at each step: S tensors [T, H]."""
    num_tokens = len(document.ids)
    embeddings, chunks = setting.embedding[document.ids], list(document.states[:, :-1].unbind(1))
    if setting.image is not None:
        state = chunks.pop(0)
        embeddings = torch.stack(
            [s if i == setting.image else e for i, s, e in zip(document.ids, state, embeddings, strict=True)]
        )
    if setting.norm_before_fc:
        joined = rms(torch.cat(chunks, -1), weights["input_norm.weight"], setting.eps)
        chunks = list(joined.chunk(len(chunks), -1))
    if setting.fc_norm:
        chunks = [rms(c, weights[f"fc_norm.{i}.weight"], setting.eps) for i, c in enumerate(chunks)]
    u = torch.cat(chunks, -1) @ weights["fc.weight"].T
    time, normed = torch.arange(num_tokens), []
    caches = [([], []) for _ in range(setting.num_layers)]
    for step in range(setting.num_steps):
        following = torch.clamp(
            time + 1 + step, max=num_tokens - 1
        )  # past the end: any token, never labelled
        token = embeddings[following]
        for index, cache in enumerate(caches):
            u = run_layer(weights, index, (u, token), time + step, cache, setting)
        normed.append(rms(u, weights["norm.weight"], setting.eps))
        if setting.norm_output:
            u = normed[-1]
    return normed


def run_layer(weights, index, inputs, positions, cache, setting: Setting) -> Tensor:
    """One layer at one step; layer 0 sees the token beside the state. ``cache``: its keys and values of all steps."""
    (u, token), (keys, values) = inputs, cache
    own = weights_of(weights, f"layers.{index}." if index else "midlayer.")
    x = rms(u if index else token, own["input_layernorm.weight"], setting.eps)
    if not index:
        normed = rms(u, own["hidden_norm.weight"], setting.eps)
        x, u = torch.cat([x, normed], -1), normed if setting.norm_before_residual else u
    heads = grouped_heads if setting.latent is None else latent_heads
    q, k, v = heads(own, x, positions, setting)
    keys.append(k)
    values.append(v)
    # Query t sees keys ≤ t of step 0 and, of each later step, its own index only.
    causal, same = torch.ones(len(x), len(x)).tril().bool(), torch.eye(len(x)).bool()
    if setting.window is not None:  # of the later steps' keys none is as far away
        causal &= positions[:, None] - torch.arange(len(x)) < setting.window
    mask = torch.cat([causal] + [same] * (len(keys) - 1), -1)
    u = u + attend(q, torch.cat(keys), torch.cat(values), mask) @ own["self_attn.o_proj.weight"].T
    return u + mlp(own, rms(u, own["post_attention_layernorm.weight"], setting.eps))


def grouped_heads(own, x, positions, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T).view(len(x), heads, setting.head_dim)
        for name, heads in (
            ("q", setting.num_heads),
            ("k", setting.num_kv_heads),
            ("v", setting.num_kv_heads),
        )
    )
    if setting.qk_norm:
        q = rms(q, own["self_attn.q_norm.weight"], setting.eps)
        k = rms(k, own["self_attn.k_norm.weight"], setting.eps)
    return rope(q, positions, setting), rope(k, positions, setting), v


def latent_heads(own, x, positions, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V2's equations 37 to 47, head by head; the scale of the scores is in the queries."""
    sizes, queries, keys, values = setting.latent, [], [], []
    normed_q = rms(x @ own["self_attn.q_a_proj.weight"].T, own["self_attn.q_a_layernorm.weight"], setting.eps)
    compressed = x @ own["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms(compressed[:, : sizes.kv_rank], own["self_attn.kv_a_layernorm.weight"], setting.eps)
    shared = rotate_pairs(compressed[:, sizes.kv_rank :], positions, setting)
    up_q = own["self_attn.q_b_proj.weight"].view(setting.num_heads, sizes.nope + sizes.rope, -1)
    up_kv = own["self_attn.kv_b_proj.weight"].view(setting.num_heads, sizes.nope + sizes.value, -1)
    for head in range(setting.num_heads):
        q = normed_q @ up_q[head].T
        rotated = rotate_pairs(q[:, sizes.nope :], positions, setting)
        queries.append(torch.cat([q[:, : sizes.nope], rotated], -1) * sizes.score_scale)
        keys.append(torch.cat([latent @ up_kv[head, : sizes.nope].T, shared], -1))
        values.append(latent @ up_kv[head, sizes.nope :].T)
    return torch.stack(queries, 1), torch.stack(keys, 1), torch.stack(values, 1)


def rotate_pairs(x: Tensor, positions: Tensor, setting: Setting) -> Tensor:
    """x [T, channels]; the pair (2i, 2i + 1) is a complex number that is turned."""
    angle = positions.to(x.dtype)[:, None] * setting.inv_freq.to(x.dtype)
    turned = torch.view_as_complex(x.reshape(len(x), -1, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(1) * setting.rope_scale


def dense_eagle3(weights: dict[str, Tensor], documents: list[Document], setting: Setting) -> Result:
    """Loss of the documents as one global batch, with metrics."""
    steps, kept = setting.num_steps, torch.tensor(setting.kept)
    numerators = [torch.zeros((), dtype=setting.embedding.dtype) for _ in range(steps)]
    result = Result(numerators[0], [0] * steps, [0.0] * steps, [0.0] * steps, [0.0] * steps, [0.0] * steps)
    result.refused = [0] * steps if setting.opd else None
    distilled = [numerators[0], numerators[0]]  # the sums over accepted and over refused guesses
    for document in documents:
        states = hidden_states(weights, document, setting)
        teacher = setting.teacher_logits(document)
        for t in range(len(document.ids)):
            chain = reached = 1
            for s in range(steps):
                if not is_labelled(document, t, s):
                    chain = reached = 0
                    continue
                logits, z = states[s][t] @ weights["lm_head.weight"].T, teacher[t + 1 + s]
                value, alpha = row_loss(setting.loss, logits, z, kept)
                guess = int(kept[logits.argmax()])
                agreed = int(guess == z.argmax())
                chance = float(z.softmax(0)[guess])
                chain *= agreed
                refused = setting.opd and is_refused(document, t, s)
                if refused:
                    log_q, log_p = logits.log_softmax(-1), z[kept].log_softmax(-1)
                    value = (log_q.exp() * (log_q - log_p)).sum()
                    result.refused[s] += 1
                if int(z.argmax()) in setting.kept:
                    numerators[s] = numerators[s] + value
                    distilled[refused] = distilled[refused] + (setting.decay**s if refused else 1) * value
                result.counted[s] += 1
                result.agreed[s] += agreed
                result.acceptance[s] += float(alpha.detach())
                result.chance[s] += chance
                result.chain_sum += chain + (s == 0)
                result.chain_sum_t1 += reached * chance + (s == 0)
                reached *= int(guess == document.ids[t + 2 + s])
                result.chain_sum_data += reached + (s == 0)
    counted = [(s, n) for s, n in enumerate(result.counted) if n]
    result.step_loss = [float(value.detach()) for value in numerators]
    if setting.opd:
        accepted = sum(result.counted) - sum(result.refused)
        refused = sum(setting.decay**s * n for s, n in enumerate(result.refused))
        result.loss = distilled[0] / max(accepted, 1) / 2 + distilled[1] / (refused or 1) / 2
        return result
    result.loss = sum((setting.decay**s * numerators[s] / n for s, n in counted), numerators[0] * 0)
    return result
