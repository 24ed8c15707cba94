"""Define the options of the LiLiCorr draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Self

import pydantic

from spec_draft_dflash2.config import CandidateConfig


class LiLiCorrConfig(CandidateConfig):
    """Options of the LiLiCorr draft; the paper's values are the defaults."""

    block_size: int | None = pydantic.Field(None, ge=2, le=1024)
    """Number of slots of a block: the last known token and block_size − 1 guesses. None means 16."""
    conv_kernel_size: int | None = pydantic.Field(None, ge=0, le=1024)
    """Number of taps of DFlash2's convolutions; 0 leaves them out, as in DFlash. At most ``block_size``. None means
    2."""
    conv_group_size: int | None = pydantic.Field(None, ge=0)
    """Number of channels that share the taps computed from a slot's state; it divides the hidden size. None
    means 16."""
    lilicorr_candidate_topk: int | None = pydantic.Field(None, ge=1)
    """Number of candidates of a guess: the tokens with the largest logits of the target's head. It is a power of
    two, at most 16. None means 8."""
    lilicorr_hidden_size: int | None = pydantic.Field(None, ge=1)
    """Width of the layers that compare candidates. None means 1024, or the target's width if that is less."""
    lilicorr_num_layers: int | None = pydantic.Field(None, ge=1, le=1024)
    """Number of layers that compare candidates. None means 2."""
    lilicorr_num_heads: int | None = pydantic.Field(None, ge=1)
    """Attention heads of these layers. None means 8."""
    lilicorr_mlp_ratio: float | None = pydantic.Field(None, gt=0)
    """Width of these layers' MLP, as a multiple of ``lilicorr_hidden_size``. None means 2."""
    lilicorr_factor_dim: int | None = pydantic.Field(None, ge=1)
    """Number of channels of a candidate's two vectors, which are compared with its neighbours' vectors. None means
    ``lilicorr_hidden_size``."""
    lilicorr_logit_scale: float | None = pydantic.Field(None, gt=0)
    """Factor between the cosine of two vectors and the score of a step from one candidate to the next. None means
    8."""
    lilicorr_vector_eps: float | None = pydantic.Field(None, gt=0, lt=0.5)
    """Least length by which a vector is divided. None means 1e-4."""

    gamma: float = pydantic.Field(7.0, gt=0)
    """The head's loss of guess k is weighted by exp(−(k − 1) / gamma)."""
    ce_weight: float = pydantic.Field(1.0, ge=0)
    """Factor on the head's cross-entropies to the next tokens."""
    soft_weight: float = pydantic.Field(0.0, ge=0)
    """Factor on the head's cross-entropies to the target's distribution."""
    path_weight: float = pydantic.Field(0.25, ge=0)
    """Factor on the cross-entropy of the next token among the candidates."""
    margin_weight: float = pydantic.Field(0.0, ge=0)
    """Factor on what the next token's score lacks to be ``margin`` above the scores of all other candidates."""
    margin: float = pydantic.Field(2.0, gt=0)
    """Wanted difference of scores."""
    penalty_weight: float = pydantic.Field(0.25, ge=0)
    """Factor on the expected difference between the target's logits of the next token and of the guess, if that is
    positive."""

    @pydantic.model_validator(mode="after")
    def _trains_the_path(self) -> Self:
        if self.path_weight == self.margin_weight == self.penalty_weight == 0:
            raise ValueError(
                "path_weight=0, margin_weight=0 and penalty_weight=0 leave nothing that trains the choice of a path"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _has_the_convolutions(self) -> Self:
        if self.conv_kernel_size == 0 and self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size}, but conv_kernel_size=0 leaves the convolutions out"
            )
        return self
