"""Tiny documents and batches of all drafts' tests, in ours and in the dense references' terms."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_core import Draft, TargetSpec
from spec_core.records import DraftBatch, Span, Supervision
from spec_kit.layers import TargetOps

from .dense_parts import Document
from .draft_parts import CPU, make_ops, make_tensors

SEED = 11
LENGTHS = [9, 1, 14, 2, 3, 23]
GAPS = [0, 2, 0, 3, 1, 4]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}


def random_documents(
    target: TargetSpec,
    lengths: list[int],
    seed: int,
    num_states: int = 4,
    dtype: torch.dtype = torch.float32,
    supervised: float = 0.75,
) -> list[Document]:
    """Documents of the given lengths, with holes in their masks. Only every third one is hole-free."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            ids=torch.randint(target.vocab_size, (length,), generator=generator),
            states=torch.randn(length, num_states, target.hidden_size, generator=generator).to(dtype),
            mask=torch.rand(length, generator=generator) >= (1 - supervised if index % 3 else 0),
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
    total = sum(len(document.ids) for document in documents) + sum(gaps) + padding
    ids_T, mask_T = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.bool)
    hidden_TNH = documents[0].states.new_zeros(total, *documents[0].states.shape[1:])
    guess_depth_T, spans, start = torch.zeros(total, dtype=torch.int64), [], 0
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


def supervision(documents: list[Document]) -> list[Supervision]:
    return [
        Supervision(
            sample_id=index, epoch=0, loss_mask=document.mask, guess_depth=guess_depth(document), seed=SEED
        )
        for index, document in enumerate(documents)
    ]


def denominators(draft: Draft, documents: list[Document]) -> torch.Tensor:
    return draft.denominators(supervision(documents))


def step_arguments(
    draft: Draft,
    target: TargetSpec,
    documents: list[Document],
    gaps: list[int] | None = None,
    padding: int = 0,
) -> tuple[DraftBatch, torch.Tensor, TargetOps]:
    """The arguments of a module's forward pass, in the dtype of the documents; packed without ``gaps``."""
    batch = make_batch(documents, gaps or [0] * len(documents), padding)
    return batch, denominators(draft, documents), make_ops(target, batch.hidden_TNH.dtype)


def give_anchors(draft: Draft, documents: list[Document]) -> None:
    """Hands the drawn anchors to the dense reference of a draft in blocks."""
    for document, sample in zip(documents, supervision(documents), strict=True):
        document.anchors = draft.rule.draw(sample)[0].tolist()


def transformers_rope(
    rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and scale of rotary embeddings, computed by transformers."""
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(rope))
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, CPU)
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0


def target_setting(target: TargetSpec) -> dict[str, Any]:
    """The target's part of a dense reference's setting, in float64; rotary frequencies come from transformers."""
    tensors = make_tensors(target)
    inv_freq, scale = transformers_rope(target.rope, target.head_dim, target.max_positions)
    return {
        "embedding": tensors.embedding_VH.double() * target.embedding_scale,
        "target_head": tensors.head_VH.double(),
        "target_norm": tensors.norm_H.double(),
        "inv_freq": inv_freq,
        "rope_scale": scale,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "eps": target.norm_eps,
        "logit_scale": target.logit_scale,
    }
