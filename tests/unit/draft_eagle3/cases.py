"""Tiny targets, drafts and batches for the Eagle3 tests, in ours and in the dense reference's terms."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_backend_cpu.kernels import KERNELS
from spec_core.records import DraftBatch, Span
from spec_draft_eagle3.draft import Eagle3Draft

from .. import draft_parts
from ..draft_parts import CPU, enlarge, make_tensors
from .dense_reference import Document, Latent, Setting

if TYPE_CHECKING:
    from spec_core import FindKernel, TargetSpec
    from spec_draft_eagle3.config import Eagle3Config

MLA = {
    "attention": "mla",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}


def make_target(**changes) -> TargetSpec:
    """Return the target of all drafts as a Llama."""
    return draft_parts.make_target(**{"architecture": "LlamaForCausalLM", "model_type": "llama", **changes})


def make_model(
    target: TargetSpec,
    config: Eagle3Config,
    dtype: torch.dtype = torch.float32,
    kernel: FindKernel = KERNELS.get,
):
    """A draft whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    counts = torch.randint(0, 5, (target.vocab_size,))
    module = Eagle3Draft(config).build(target, make_tensors(target), counts, kernel)
    return enlarge(module).to(dtype)


def random_documents(
    target: TargetSpec, lengths: list[int], seed: int, num_captured: int = 3
) -> list[Document]:
    """Documents of the given lengths; about a third of the tokens unsupervised."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            ids=torch.randint(target.vocab_size, (length,), generator=generator),
            states=torch.randn(length, num_captured + 1, target.hidden_size, generator=generator),
            mask=torch.rand(length, generator=generator) > 0.35,
        )
        for length in lengths
    ]


def decode(documents: list[Document], seed: int, proposed: int = 3) -> None:
    """Gives documents the rounds of an engine, the first one behind some known tokens; the last may end outside."""
    draw = random.Random(seed)
    for document in documents:
        document.rounds, document.proposed, last = [], proposed, draw.randint(1, 4)
        while last < len(document.ids):
            document.rounds.append((last, draw.randint(0, proposed)))
            last += 1 + document.rounds[-1][1]


def guess_depth(document: Document) -> torch.Tensor | None:
    if document.rounds is None:
        return None
    place = torch.zeros(len(document.ids), dtype=torch.int64)
    for last, accepted in document.rounds:
        for k in range(1, min(accepted + 1, document.proposed) + 1):
            place[last + k : last + k + 1] = k
    return place


def make_batch(documents: list[Document], gaps: list[int], padding: int = 0) -> DraftBatch:
    """Lays documents along one axis, ``gaps[i]`` padding tokens behind document i (packed: no gaps), then
    ``padding`` more."""
    pieces, spans, cursor = [], [], 0
    width = documents[0].states.shape[1:] if documents else (4, 16)
    nothing = Document(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0, *width), torch.zeros(0, dtype=torch.bool)
    )
    for document, gap in [*zip(documents, gaps, strict=True), (nothing, padding)]:
        stop = cursor + len(document.ids)
        spans.append(Span(sample_id=len(spans), epoch=0, start=cursor, stop=stop))
        empty = (
            torch.zeros(gap, dtype=torch.int64),
            torch.zeros(gap, *width),
            torch.zeros(gap, dtype=torch.bool),
        )
        pieces += [(document.ids, document.states, document.mask), empty]
        cursor = stop + gap
    ids_T, hidden_TNH, mask_T = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    guess_depth_T = None
    if any(document.rounds is not None for document in documents):
        guess_depth_T = torch.zeros(len(ids_T), dtype=torch.int64)
        for document, span in zip(documents, spans, strict=False):
            guess_depth_T[span.start : span.stop] = guess_depth(document)
    return DraftBatch(
        input_ids_T=ids_T,
        hidden_TNH=hidden_TNH,
        loss_mask_T=mask_T,
        spans=tuple(spans[: len(documents)]),
        guess_depth_T=guess_depth_T,
    )


def make_setting(target: TargetSpec, module, dtype: torch.dtype) -> Setting:
    """The same problem for the dense reference; rotary frequencies come from transformers."""
    tensors, config = make_tensors(target), module.config
    latent = make_latent(target, config) if config.attention == "mla" else None
    inv_freq, scale = transformers_rope(target, config)
    return Setting(
        embedding=tensors.embedding_VH.to(dtype),
        target_head=tensors.head_VH.to(dtype),
        target_norm=tensors.norm_H.to(dtype),
        kept=module.ids_V.tolist(),
        inv_freq=inv_freq,
        rope_scale=scale,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        eps=target.norm_eps,
        logit_scale=target.logit_scale,
        num_steps=config.num_steps,
        decay=config.step_decay,
        loss=config.loss,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        num_layers=config.num_layers or 1,
        latent=latent,
        image=module.merged_token_id,
    )


def make_latent(target: TargetSpec, config: Eagle3Config) -> Latent:
    mscale = 0.1 * math.log(target.rope.get("factor", 1.0)) + 1
    return Latent(
        kv_rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        score_scale=mscale**2,
    )


def latent_rope(target: TargetSpec) -> dict[str, object]:
    """YaRN as DeepSeek V3's: the temperature is in the scores alone."""
    plain = {"factor": 1.0, "original_max_position_embeddings": target.max_positions}
    return {**plain, **target.rope, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}


def transformers_rope(target: TargetSpec, options: Eagle3Config) -> tuple[torch.Tensor, float]:
    if options.attention == "mla":
        config = DeepseekV3Config(
            qk_rope_head_dim=options.qk_rope_head_dim,
            max_position_embeddings=target.max_positions,
            rope_parameters=latent_rope(target),
        )
        return ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    config = LlamaConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_positions,
        rope_parameters=dict(target.rope),
    )
    kind = target.rope["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, CPU)
    dim = int(target.head_dim * target.rope.get("partial_rotary_factor", 1.0))
    return 1.0 / target.rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0
