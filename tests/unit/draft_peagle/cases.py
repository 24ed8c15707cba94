"""Tiny drafts for the P-EAGLE tests, in ours and the dense reference's terms; targets and batches are Eagle3's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core.records import Supervision
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_peagle.chains import ChainRule
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.draft import PEagleDraft

from ..draft_eagle3.cases import transformers_rope
from ..draft_parts import enlarge, make_tensors
from .dense_reference import Document, Setting

if TYPE_CHECKING:
    from spec_core import FindKernel, TargetSpec


def make_config(**options) -> PEagleConfig:
    return PEagleConfig(**{"num_guesses": 4, "num_layers": 2, **options})


def make_model(
    target: TargetSpec,
    config: PEagleConfig,
    dtype: torch.dtype = torch.float32,
    kernel: FindKernel = KERNELS.get,
):
    """A draft whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    counts = torch.randint(0, 5, (target.vocab_size,))
    module = PEagleDraft(config).build(target, make_tensors(target), counts, kernel)
    return enlarge(module).to(dtype)


def random_documents(
    target: TargetSpec, lengths: list[int], seed: int, supervised: float = 0.75
) -> list[Document]:
    """Documents of the given lengths, some tokens of which are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            ids=torch.randint(target.vocab_size, (length,), generator=generator),
            states=torch.randn(length, 4, target.hidden_size, generator=generator),
            mask=torch.rand(length, generator=generator) < supervised,
        )
        for length in lengths
    ]


def supervision(documents: list[Document]) -> list[Supervision]:
    return [
        Supervision(sample_id=index, epoch=0, loss_mask=document.mask)
        for index, document in enumerate(documents)
    ]


def make_rule(config: PEagleConfig) -> ChainRule:
    return ChainRule(
        num_guesses=config.num_guesses,
        retention=config.retention,
        least_retention=config.least_retention,
    )


def give_elements(config: PEagleConfig, documents: list[Document]) -> None:
    """Hands the drawn chains to the dense reference."""
    for document, sample in zip(documents, supervision(documents), strict=True):
        count_R, _ = make_rule(config).draw(sample)
        document.elements = [(row, d) for row, length in enumerate(count_R.tolist()) for d in range(length)]


def denominators(config: PEagleConfig, documents: list[Document]) -> torch.Tensor:
    return PEagleDraft(config).denominators(supervision(documents))


def make_setting(target: TargetSpec, module, dtype: torch.dtype) -> Setting:
    """The same problem for the dense reference; rotary frequencies come from transformers."""
    tensors, config = make_tensors(target), module.config
    inv_freq, scale = transformers_rope(target, Eagle3Config())
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
        num_layers=module.shape.num_layers,
        mask_token_id=module.shape.mask_token_id,
        num_guesses=config.num_guesses,
        logit_scale=target.logit_scale,
        loss=config.loss,
    )
