"""VocabularyShape is the shape of a draft whose vocabulary may be reduced; importing it imports no torch."""

from __future__ import annotations

from pydantic import Field

from spec_kit.drafting.decoder_shape import DecoderShape
from spec_kit.drafting.draft_files import (
    Shapes,
    Size,
)
from spec_kit.sharding import TensorParallelHints

_WHOLE = TensorParallelHints()


class VocabularyShape(DecoderShape):
    """The shape of a draft of decoder layers whose head may have fewer rows than the target's vocabulary."""

    vocab_size: Size = Field(
        default_factory=lambda sizes: sizes["target_vocab_size"], alias="draft_vocab_size"
    )
    """Number of rows V' of the draft's head; equal to ``target_vocab_size`` if the vocabulary is not
    reduced."""

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is smaller than the target's."""
        return self.vocab_size < self.target_vocab_size

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return the shapes of the mapping tensors that a folder must have, and of all that it may have.

        ``d2t`` is required if the vocabulary is reduced.
        """
        mapping: Shapes = {"d2t": (self.vocab_size,), "t2d": (self.target_vocab_size,)}
        return {"d2t": mapping["d2t"]} if self.reduced else {}, mapping

    def vocabulary_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the vocabulary; of a reduced one, each gets as many kept tokens."""
        return TensorParallelHints(vocab_mask="t2d", vocab_size=self.vocab_size) if self.reduced else _WHOLE

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.vocab_size > self.target_vocab_size:
            return f"a draft vocabulary of {self.vocab_size} exceeds the target's {self.target_vocab_size}"
        return super().problem()
