"""Create a random target in memory, and random features as an engine would capture them.

Shapes: T tokens, N captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from spec_core import TargetSpec, TargetTensors
from spec_core.records import DraftBatch, FeatureSchema, Span, Supervision
from spec_kit.layers.target_ops import TargetOps

VOCAB, HIDDEN = 97, 64
PAD_FEATURE = 0.0


@dataclass(frozen=True)
class ToySample:
    """One document: token ids, features and loss mask."""

    sample_id: int
    input_ids: Tensor
    """Token ids, int64 [T]."""
    hidden_TNH: Tensor
    loss_mask: Tensor
    """Whether each token is supervised, bool [T]."""
    guess_depth: Tensor | None = None
    """``Supervision.guess_depth``, int64 [T]."""

    @property
    def supervision(self) -> Supervision:
        """The data of the sample from which denominators are computed."""
        return Supervision(
            sample_id=self.sample_id, epoch=0, loss_mask=self.loss_mask, guess_depth=self.guess_depth
        )


def toy_target(folder: Path, **changes: object) -> TargetSpec:
    """Return a target: 8 layers, width 64, 2 query heads and 1 key head, 97 tokens, untied, float32.

    ``changes``: fields of TargetSpec with other values.
    """
    fields: dict[str, object] = {
        "folder": folder,
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "digest": "0" * 64,
        "num_layers": 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_positions": 512,
        "dtype": "float32",
        "embedding_name": "model.embed_tokens.weight",
        "head_name": "lm_head.weight",
        "norm_name": "model.norm.weight",
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_ids": (1,),
    }
    return TargetSpec(**{**fields, **changes})  # type: ignore[arg-type]


def toy_tensors(target: TargetSpec) -> TargetTensors:
    """Return random tensors for the target.

    All rows of the head have the same norm. So for a hidden state that equals row i, the largest logit is logit i.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (target.vocab_size, target.hidden_size)
    head_VH = torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1)
    return TargetTensors(
        embedding_VH=torch.randn(shape, generator=generator),
        head_VH=2 * head_VH,
        norm_H=1 + 0.1 * torch.rand(target.hidden_size, generator=generator),
    )


def stored_toy_target(folder: Path) -> TargetSpec:
    """Return ``toy_target``, whose tensors are in the new ``folder``, for drafts that export some of them."""
    from safetensors.torch import save_file

    target = toy_target(folder)
    tensors = toy_tensors(target)
    folder.mkdir()
    stored = {
        target.embedding_name: tensors.embedding_VH,
        target.head_name: tensors.head_VH,
        target.norm_name: tensors.norm_H,
    }
    save_file(stored, folder / "model.safetensors")
    return target


def toy_ops(target: TargetSpec, tensors: TargetTensors) -> TargetOps:
    """Return the target's VocabularyOps on the CPU in float32."""
    return TargetOps(target, tensors, torch.device("cpu"), torch.float32)


def toy_tokens(length: int, generator: Generator) -> Tensor:
    """Return token ids [T] in which each token determines the next, so that a draft can learn them."""
    tokens = [int(torch.randint(VOCAB, (1,), generator=generator))]
    while len(tokens) < length:
        tokens.append((3 * tokens[-1] + 5) % VOCAB)
    return torch.tensor(tokens[:length])


def toy_features(
    next_ids: Tensor, schema: FeatureSchema, target: TargetSpec, tensors: TargetTensors, generator: Generator
) -> Tensor:
    """Return random states [T, N, H].

    If the input of the final norm is captured, the target predicts ``next_ids`` [T] from it.
    """
    hidden_TNH = torch.randn(schema.shape(len(next_ids)), generator=generator)
    for index, layer in enumerate(schema.layers):
        if layer == target.num_layers:
            # Final norm and head turn this state into a distribution whose arg-max is the next token.
            hidden_TNH[:, index] = tensors.head_VH[next_ids] / tensors.norm_H
    return hidden_TNH


def toy_samples(
    schema: FeatureSchema, target: TargetSpec, tensors: TargetTensors, lengths: Sequence[int]
) -> list[ToySample]:
    """Return documents of these lengths.

    Three of four tokens are supervised. Every fifth document has no supervised token.
    """
    generator = torch.Generator().manual_seed(2)
    samples: list[ToySample] = []
    for sample_id, length in enumerate(lengths):
        tokens = toy_tokens(length + 1, generator)
        mask = torch.rand(length, generator=generator) < (0.75 if sample_id % 5 != 4 else 0)
        hidden_TNH = toy_features(tokens[1:], schema, target, tensors, generator)
        samples.append(ToySample(sample_id, tokens[:-1], hidden_TNH, mask))
    return samples


def toy_batch(samples: Sequence[ToySample], schema: FeatureSchema, width: int = 0) -> DraftBatch:
    """Return a batch of the documents, one after the other, each padded to at least ``width`` tokens.

    Without samples the batch has ``width`` tokens of padding and no span.
    """
    rooms = [max(width, len(sample.input_ids)) for sample in samples]
    total = sum(rooms) if samples else width
    input_ids_T = torch.zeros(total, dtype=torch.int64)
    hidden_TNH = torch.full(schema.shape(total), PAD_FEATURE)
    loss_mask_T = torch.zeros(total, dtype=torch.bool)
    guess_depth_T = torch.zeros(total, dtype=torch.int64)
    spans: list[Span] = []
    start = 0
    for sample, room in zip(samples, rooms, strict=True):
        stop = start + len(sample.input_ids)
        input_ids_T[start:stop] = sample.input_ids
        hidden_TNH[start:stop] = sample.hidden_TNH
        loss_mask_T[start:stop] = sample.loss_mask
        if sample.guess_depth is not None:
            guess_depth_T[start:stop] = sample.guess_depth
        spans.append(Span(sample_id=sample.sample_id, epoch=0, start=start, stop=stop))
        start += room
    guessed = any(sample.guess_depth is not None for sample in samples)
    return DraftBatch(
        input_ids_T=input_ids_T,
        hidden_TNH=hidden_TNH,
        loss_mask_T=loss_mask_T,
        spans=tuple(spans),
        guess_depth_T=guess_depth_T if guessed else None,
    )
