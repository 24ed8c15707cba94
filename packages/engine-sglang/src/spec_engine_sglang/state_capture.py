"""StateCapture divides the states of SGLang's forward passes by request, and exports each request.

It runs in SGLang's scheduler process, around ``ModelRunner.forward``. The rows of a batch are the tokens of
its requests, one request after the other. A long prompt is run in chunks, in several passes, often together
with other requests.

Shapes: R rows of a forward pass, T tokens of a request, N captured layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from spec_core.errors import EngineError
from spec_engine_sglang.request_names import Assignment, read_name
from spec_engine_sglang.stream_taps import StreamTaps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from spec_core.records import FeatureSchema
    from spec_kit.hosting import FeatureExporter


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a pass: consecutive tokens of a request, from its token ``first`` on."""

    request: Assignment
    first: int
    start: int
    stop: int

    @property
    def end(self) -> int:
        """Index, within the request, of the token after the piece."""
        return self.first + self.stop - self.start


@dataclass
class _Partial:
    """A request whose first ``filled`` tokens have been captured."""

    ids_T: Tensor
    states_TNH: Tensor
    filled: int = 0


class StateCapture:
    """Captures states in one scheduler process."""

    def __init__(
        self,
        model: nn.Module,
        exporter: FeatureExporter,
        schema: FeatureSchema,
        norm: str,
        image: Sequence[int] = (),
    ) -> None:
        """Hook the layers of ``schema`` and the final norm in ``model``.

        ``image``: for a multimodal target, the size of its vocabulary and the id of its image placeholder
        token.
        """
        self._exporter = exporter
        self._image = tuple(image)
        self._schema = schema
        self._taps = StreamTaps(model, schema, norm)
        self._partial: dict[int, _Partial] = {}
        self.description = self._taps.description

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``ModelRunner.forward`` that captures the states of each call."""

        @wraps(forward)
        def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            pieces = pieces_of(forward_batch)
            if not pieces:
                return forward(forward_batch, *args, **kwargs)
            num_rows = sum(forward_batch.extend_seq_lens_cpu)
            with torch.inference_mode(False):  # inference mode forbids later writes outside it
                ids_R = torch.empty(num_rows, dtype=torch.int64, device=forward_batch.input_ids.device)
            ids_R.copy_(forward_batch.input_ids[:num_rows])
            if self._image:
                # For its prefix cache, SGLang replaces an image's tokens by digests of the image.
                vocab_size, image_token_id = self._image
                ids_R.masked_fill_(ids_R >= vocab_size, image_token_id)
            self._taps.open(num_rows, ids_R.device)
            result = forward(forward_batch, *args, **kwargs)
            self._collect(pieces, ids_R)
            return result

        return watched

    def _collect(self, pieces: list[Piece], ids_R: Tensor) -> None:
        try:
            states_RNH = self._taps.close()
        except EngineError as error:
            for piece in pieces:
                self._fail(piece, error)
            return
        for piece in pieces:
            rows = slice(piece.start, piece.stop)
            try:
                self._add(piece, ids_R[rows], states_RNH[rows])
            except (EngineError, RuntimeError) as error:  # RuntimeError: for example, torch is out of memory
                self._fail(piece, error)

    def _add(self, piece: Piece, ids_T: Tensor, states_TNH: Tensor) -> None:
        request_id, num_tokens, destinations = piece.request
        if piece.first == 0 and piece.end == num_tokens:
            self._exporter.export(request_id, destinations, ids_T, states_TNH)
            return
        partial = self._begun(piece, ids_T.device)
        partial.ids_T[piece.first : piece.end].copy_(ids_T)
        partial.states_TNH[piece.first : piece.end].copy_(states_TNH)
        partial.filled = piece.end
        if piece.end == num_tokens:
            del self._partial[request_id]
            self._exporter.export(request_id, destinations, partial.ids_T, partial.states_TNH)

    def _begun(self, piece: Piece, device: torch.device) -> _Partial:
        request_id, num_tokens, _ = piece.request
        if piece.first == 0:
            # A request that SGLang had to start again also begins here.
            with torch.inference_mode(False):
                ids_T = torch.empty(num_tokens, dtype=torch.int64, device=device)
                shape = self._schema.shape(num_tokens)
                states_TNH = torch.empty(shape, dtype=self._schema.torch_dtype(), device=device)
            self._partial[request_id] = _Partial(ids_T, states_TNH)
        partial = self._partial.get(request_id)
        if partial is None or partial.filled != piece.first:
            come = partial.filled if partial else 0
            raise EngineError(
                f"SGLang did not compute tokens {come} to {piece.first - 1} of the prompt (a cache?)"
            )
        return partial

    def _fail(self, piece: Piece, error: BaseException) -> None:
        self._partial.pop(piece.request.request_id, None)
        self._exporter.fail(piece.request.request_id, error)


def pieces_of(forward_batch: Any) -> list[Piece]:
    """Return the pieces of captured requests that a forward pass computes; none for a pass that decodes.

    This reads only fields of the batch that are on the CPU (``ForwardBatch`` of
    ``model_executor/forward_batch_info.py``), so it does not wait for the device.
    """
    lengths, firsts = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    if not forward_batch.forward_mode.is_extend() or lengths is None:
        return []
    pieces: list[Piece] = []
    start = 0
    for name, length, first in zip(forward_batch.rids, lengths, firsts, strict=True):
        request = read_name(name)
        if request is not None and first < request.num_tokens:  # else the request decodes in a mixed batch
            pieces.append(Piece(request, first, start, start + length))
        start += length
    return pieces
