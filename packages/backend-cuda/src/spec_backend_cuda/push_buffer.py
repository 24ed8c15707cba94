"""PushBuffer is the sender's side of a ``PushPool``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_backend_cuda.p2p_link import P2PLink
from spec_core.records import FeatureSample
from spec_kit.streams import DeferredBuffer, GrantInfo, Packet, PendingSend, SampleLayout, staged_copy


class _Push(PendingSend):
    """A sample copied to a staging buffer, divided like its block in the receiver's memory."""

    def __init__(self, link: P2PLink, parts: Sequence[Tensor], staged: torch.cuda.Event) -> None:
        self._link = link
        self._parts = parts
        self._staged = staged

    def wait_sendable(self) -> None:
        self._staged.synchronize()
        if self._parts:
            self._link.start(self._parts)

    def wait_sent(self) -> None:
        if self._parts:
            self._link.finish()


class PushBuffer(DeferredBuffer):
    """A sender's buffer: ``write`` copies a sample to a staging buffer on the current stream.

    Later work on this stream may overwrite the sample's memory (T2). The staging buffer is freed when it has
    been sent. Only samples that the receiver has granted are staged, so the window also limits the memory of
    staging buffers.
    """

    def __init__(self, layout: SampleLayout, link: P2PLink, device: torch.device) -> None:
        """Send over ``link``; ``close`` closes it."""
        self._layout = layout
        self._link = link
        self._device = device
        self._pending: list[_Push] = []

    def open(self) -> None:
        """Wait until both sides of the link are connected."""
        self._link.open()

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy a sample to a staging buffer on the current stream."""
        copy = staged_copy(sample, self._layout, self._device)
        staged = self._link.new_event()
        staged.record(torch.get_device_module(self._device).current_stream(self._device))
        parts = copy.split(GrantInfo.decode(grant.payload).lengths) if copy.nbytes else ()
        self._pending.append(_Push(self._link, parts, staged))

    def take_pending(self) -> PendingSend:
        """Return the pending send that the last ``write`` started."""
        return self._pending.pop()

    def settle(self) -> None:
        """Do nothing: staged copies belong to this buffer alone, so there is nothing to wait for."""

    def abandon(self) -> None:
        """Make pending and future sends raise PeerLost."""
        self._link.abort()

    def close(self) -> None:
        """Close the link."""
        self._link.close()
