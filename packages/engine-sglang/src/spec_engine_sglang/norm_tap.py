"""NormTap copies the input of the final norm in each forward pass, also if a graph is replayed.

SGLang's models return the states of the layers that a draft reads, but not the input of their final norm.
Before SGLang records a graph, it runs the pass in Python, so the hook of NormTap is called and its copy into a
fixed buffer becomes a part of the graph.

Shapes: R rows of a forward pass (tokens of all its requests), H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spec_core.errors import EngineError
from spec_engine_sglang.stream_taps import before_norm, what_is_wrong


class NormTap:
    """A hook before the final norm; any pass may be read right after it, between ``open`` and ``close``."""

    def __init__(self, norm: nn.Module, graph_rows: int, like: Tensor) -> None:
        """Hook ``norm``.

        ``graph_rows``: the largest number of rows of a graph that SGLang will record.
        ``like``: a tensor whose last dimension, dtype and device are those of the stream.
        """
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            self._buffer_RH = torch.full(
                (graph_rows, like.shape[-1]), torch.nan, dtype=like.dtype, device=like.device
            )
        self._taken_RH: Tensor | None = None
        self._overflow_RH: Tensor | None = None
        """States of the current pass, if it has more rows than the graph's buffer; None if they are not needed."""
        self._problem: str | None = None
        norm.register_forward_pre_hook(before_norm(self._take), with_kwargs=True)

    def open(self, num_rows: int) -> None:
        """Prepare for a forward pass of ``num_rows`` rows, whose states are needed.

        Memory is allocated here, because an error inside the pass would end the server.
        """
        self._taken_RH = self._overflow_RH = None
        # Rows that a replayed graph does not write remain NaN, and the trainer leaves them out.
        self._buffer_RH[:num_rows].fill_(torch.nan)
        is_larger = num_rows > len(self._buffer_RH)
        self._overflow_RH = (
            self._buffer_RH.new_empty(num_rows, self._buffer_RH.shape[1]) if is_larger else self._buffer_RH
        )

    def close(self, num_rows: int) -> Tensor:
        """Return the states [R, H] of the pass, before the next one. Raise EngineError if there are none."""
        found_RH = self._buffer_RH if self._taken_RH is None else self._taken_RH
        self._taken_RH = self._overflow_RH = None
        if self._problem is not None:
            raise EngineError(self._problem)
        if len(found_RH) < num_rows:
            raise EngineError(f"SGLang ran {num_rows} rows without its final norm (a replayed graph?)")
        return found_RH[:num_rows]

    def _take(
        self, hidden: Tensor, residual: Tensor | None = None, late: Tensor | None = None, **_: object
    ) -> None:
        """Copy the stream. Passes that fit into the buffer are always copied, as they may be recorded."""
        rows = len(hidden)
        room_RH = self._buffer_RH if rows <= len(self._buffer_RH) else self._overflow_RH
        if room_RH is None:
            return
        self._problem = self._problem or what_is_wrong(hidden, residual, rows, room_RH.shape[1])
        if self._problem is not None:
            return
        out_RH = room_RH[:rows]
        rows = len(out_RH)  # padding rows may exceed the buffer
        if residual is None:
            out_RH.copy_(hidden[:rows])
        else:
            torch.add(hidden[:rows], residual[:rows], out=out_RH)
        if late is not None:
            out_RH += late[:rows]
        self._taken_RH = out_RH
