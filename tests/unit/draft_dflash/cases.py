"""Tiny targets, drafts and batches for the DFlash tests, in ours and in the dense reference's terms."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_core.records import DraftBatch, Span, Supervision
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_kit.block_drafting import BlockRule

from ..draft_parts import CPU, enlarge, make_tensors
from .dense_reference import Document, Setting

if TYPE_CHECKING:
    from spec_core import TargetSpec

SEED = 11
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_config(**options) -> DFlashConfig:
    return DFlashConfig(**{"block_size": 5, "num_layers": 2, "num_anchors": 6, **options})


def make_parts(module) -> None:
    """The dense reference needs nothing besides the setting."""


def make_model(target: TargetSpec, config: DFlashConfig, dtype: torch.dtype = torch.float32):
    """A draft whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    module = DFlashDraft(config).build(target, make_tensors(target), None)
    return enlarge(module).to(dtype)


def random_documents(
    target: TargetSpec, lengths: list[int], seed: int, num_states: int = 5, dtype: torch.dtype = torch.float32
) -> list[Document]:
    """Documents of the given lengths, with holes in their masks. Only every third one is hole-free."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            ids=torch.randint(target.vocab_size, (length,), generator=generator),
            states=torch.randn(length, num_states, target.hidden_size, generator=generator).to(dtype),
            mask=torch.rand(length, generator=generator) > (0.25 if index % 3 else -1),
        )
        for index, length in enumerate(lengths)
    ]


def decode(documents: list[Document], seed: int, proposed: int = 3) -> None:
    """Gives documents the rounds of an engine, the first one behind some known tokens; the last may end outside."""
    draw = random.Random(seed)
    for document in documents:
        document.rounds, document.proposed, last = {}, proposed, draw.randint(0, 3)
        while last < len(document.ids):
            document.rounds[last] = draw.randint(0, proposed)
            last += 1 + document.rounds[last]


def guess_depth(document: Document) -> torch.Tensor | None:
    if document.rounds is None:
        return None
    place = torch.zeros(len(document.ids), dtype=torch.int64)
    for last, accepted in document.rounds.items():
        for k in range(1, min(accepted + 1, document.proposed) + 1):
            place[last + k : last + k + 1] = k
    return place


def make_batch(
    documents: list[Document], gaps: list[int], padding: int = 0, ids: list[int] | None = None
) -> DraftBatch:
    """Lays documents along one axis, ``gaps[i]`` padding tokens behind document i (packed: no gaps), then
    ``padding`` more. ``ids``: their sample ids, else their indices."""
    width = documents[0].states.shape[1:] if documents else (5, 16)
    total = sum(len(document.ids) for document in documents) + sum(gaps) + padding
    dtype = documents[0].states.dtype if documents else torch.float32
    ids_T, hidden_TNH = torch.zeros(total, dtype=torch.int64), torch.zeros(total, *width, dtype=dtype)
    mask_T, spans, start = torch.zeros(total, dtype=torch.bool), [], 0
    guess_depth_T = torch.zeros(total, dtype=torch.int64)
    for index, (document, gap) in enumerate(zip(documents, gaps, strict=True)):
        stop = start + len(document.ids)
        ids_T[start:stop], hidden_TNH[start:stop] = document.ids, document.states
        mask_T[start:stop] = document.mask
        if document.rounds is not None:
            guess_depth_T[start:stop] = guess_depth(document)
        spans.append(Span(sample_id=ids[index] if ids else index, epoch=0, start=start, stop=stop))
        start = stop + gap
    return DraftBatch(
        input_ids_T=ids_T,
        hidden_TNH=hidden_TNH,
        loss_mask_T=mask_T,
        spans=tuple(spans),
        guess_depth_T=guess_depth_T if any(document.rounds is not None for document in documents) else None,
        seed=SEED,
    )


def supervision(documents: list[Document], epoch: int = 0) -> list[Supervision]:
    return [
        Supervision(
            sample_id=index,
            epoch=epoch,
            loss_mask=document.mask,
            guess_depth=guess_depth(document),
            seed=SEED,
        )
        for index, document in enumerate(documents)
    ]


def denominators(config: DFlashConfig, documents: list[Document]) -> torch.Tensor:
    return DFlashDraft(config).denominators(supervision(documents))


def give_anchors(config: DFlashConfig, documents: list[Document]) -> None:
    """Hands the drawn anchors to the dense reference."""
    rule = BlockRule(config.num_anchors, config.block_size - 1)
    for document, sample in zip(documents, supervision(documents), strict=True):
        document.anchors = rule.draw(sample)[0].tolist()


def make_setting(target: TargetSpec, module, dtype: torch.dtype) -> Setting:
    """The same problem for the dense reference."""
    config = module.config
    return setting_of(
        target,
        module.shape,
        dtype,
        block_size=config.block_size,
        gamma=config.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(config.block_size, config.block_size / 2),
        loss=config.loss,
        alpha=config.dpace_alpha,
    )


def setting_of(target: TargetSpec, shape, dtype: torch.dtype, **own) -> Setting:
    """A draft of this shape; rotary frequencies come from transformers."""
    tensors, (inv_freq, scale) = make_tensors(target), transformers_rope(target)
    return Setting(
        embedding=tensors.embedding_VH.to(dtype) * target.embedding_scale,
        target_head=tensors.head_VH.to(dtype),
        target_norm=tensors.norm_H.to(dtype),
        inv_freq=inv_freq,
        rope_scale=scale,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        eps=target.norm_eps,
        windows=list(shape.windows),
        mask_token_id=shape.mask_token_id,
        num_features=len(shape.layers),
        **own,
    )


def transformers_rope(target: TargetSpec) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_positions,
        rope_parameters=dict(target.rope),
    )
    if target.rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[target.rope["rope_type"]](config, CPU)
    return 1.0 / target.rope["rope_theta"] ** (
        torch.arange(0, target.head_dim, 2).float() / target.head_dim
    ), 1.0
