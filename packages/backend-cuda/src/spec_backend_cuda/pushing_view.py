"""PushingView: a sender's end of pushed memory (``pushed_memory``)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from spec_backend_cuda.pushed_memory import piece_lengths
from spec_core.streams.announcing_sender import Delivery, TravellingMemory
from spec_core.streams.device_arena import copied_aside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_backend_cuda.line import Line
    from spec_core.records import FeatureSample
    from spec_core.streams.shared_memory_wire import Layout, Record


class PushingView(TravellingMemory):
    """``write`` copies a sample aside on the current stream, on which its memory may be reused from then on (T2); the
    copy goes when it is there. At most what has been granted lies aside, so the window bounds that, too."""

    def __init__(self, layout: Layout, line: Line, device: torch.device) -> None:
        self._layout, self._line, self._device = layout, line, device
        self._deliveries: list[Delivery] = []

    def open(self) -> None:
        self._line.open()

    def write(self, grant: Record, sample: FeatureSample) -> None:
        aside = copied_aside(sample, self._layout, self._device)
        copied = self._line.new_event()
        copied.record(torch.get_device_module(self._device).current_stream(self._device))
        parts = aside.split(piece_lengths(grant.note)) if aside.nbytes else ()
        self._deliveries.append(Delivery(partial(self._start, parts, copied), partial(self._finish, parts)))

    def take_delivery(self) -> Delivery:
        return self._deliveries.pop()

    def settle(self) -> None:
        """What was copied aside is nobody else's."""

    def abandon(self) -> None:
        self._line.abort()

    def close(self) -> None:
        self._line.close()

    def _start(self, parts: Sequence[Tensor], copied: torch.cuda.Event) -> None:
        copied.synchronize()
        if parts:
            self._line.start(parts)

    def _finish(self, parts: Sequence[Tensor]) -> None:
        if parts:
            self._line.finish()
