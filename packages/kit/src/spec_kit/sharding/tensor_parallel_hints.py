"""TensorParallelHints says how tensor-parallel ranks divide a draft's module; importing it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TensorParallelHints:
    """Describes how tensor-parallel ranks divide a draft's module; each rank has shards of some weights.

    A draft with these hints reads sizes from its weights' shapes, and uses ``VocabularyOps`` for the
    vocabulary. The number given for a layer is its number of equal pieces, such as heads or channels. A piece
    is never divided.
    """

    columns: Mapping[str, int] = field(default_factory=dict[str, int])
    """Linear layers whose output is divided over ranks: layer -> number of pieces. Weight rows and bias are
    divided."""
    replicated: tuple[str, ...] = ()
    """Layers of ``columns`` whose pieces may be replicated, such as key-value heads. If there are fewer
    pieces than ranks, neighbouring ranks have the same piece, and its gradient is summed over them."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Linear layers without bias whose input is divided over ranks: layer -> number of pieces. Weight columns
    are divided."""
    whole_inputs: tuple[str, ...] = ()
    """Layers of ``rows`` that get the full input, of which each rank takes its shard."""
    enters: tuple[str, ...] = ()
    """Modules whose output goes into divided layers only. The gradient of the output is summed over ranks."""
    leaves: tuple[str, ...] = ()
    """Modules whose output is a partial sum, such as the layers of ``rows``. The output is summed over
    ranks."""
    partial: tuple[str, ...] = ()
    """Modules with full weights whose input is a rank's shard, such as a norm of each head. The gradients of
    their weights are summed over ranks."""
    each_token: tuple[str, ...] = ()
    """Modules with full weights, between modules of ``leaves`` and of ``enters``, that work on each token by
    itself, such as norms. With sequence parallelism each rank has a shard of the tokens (the last dimension
    but one), and the gradients of the weights are summed over ranks. Empty if the draft does not support
    sequence parallelism."""
    all_tokens_in: Mapping[str, int] = field(default_factory=dict[str, int])
    """Modules whose first input has all tokens even with sequence parallelism; each rank takes its shard. The
    number is the size of the token dimension. 0 means the batch's tokens, or a subset whose size is a multiple
    of ``rows_multiple``."""
    all_tokens_out: tuple[str, ...] = ()
    """Modules whose output is gathered over ranks, because code that every rank runs on all tokens, such as
    the loss, uses it."""
    vocab_mask: str = ""
    """Name of a buffer, bool [V]: whether an id of the target's vocabulary has a row in the draft's head
    (rows ascend by id). The vocabulary is divided so that each rank has equally many such ids. Without a name
    it is divided equally."""
    vocab_size: int = 0
    """Number of the ids for which ``vocab_mask`` is True; the number of ranks must divide it."""

    def __add__(self, other: TensorParallelHints) -> TensorParallelHints:
        """Return the union of two sets of hints."""
        return TensorParallelHints(
            columns={**self.columns, **other.columns},
            replicated=self.replicated + other.replicated,
            rows={**self.rows, **other.rows},
            whole_inputs=self.whole_inputs + other.whole_inputs,
            enters=self.enters + other.enters,
            leaves=self.leaves + other.leaves,
            partial=self.partial + other.partial,
            each_token=self.each_token + other.each_token,
            all_tokens_in={**self.all_tokens_in, **other.all_tokens_in},
            all_tokens_out=self.all_tokens_out + other.all_tokens_out,
            vocab_mask=self.vocab_mask or other.vocab_mask,
            vocab_size=self.vocab_size or other.vocab_size,
        )
