"""PushBuffer: a sender's view of a ``PushPool``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_kit.streams import DeferredBuffer, GrantInfo, PendingSend, staged_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_backend_cuda.p2p_link import P2PLink
    from spec_core.records import FeatureSample
    from spec_kit.streams import Packet, SampleLayout


class _Push(PendingSend):
    """A staged sample, in the pieces of its block."""

    def __init__(self, link: P2PLink, parts: Sequence[Tensor], staged: torch.cuda.Event) -> None:
        self._link, self._parts, self._staged = link, parts, staged

    def wait_sendable(self) -> None:
        self._staged.synchronize()
        if self._parts:
            self._link.start(self._parts)

    def wait_sent(self) -> None:
        if self._parts:
            self._link.finish()


class PushBuffer(DeferredBuffer):
    """``write`` copies a sample aside on the current stream, on which its memory may be reused from then on (T2).

    The copy is freed when the sample is sent. At most what has been granted lies aside, so the window bounds it, too.
    """

    def __init__(self, layout: SampleLayout, link: P2PLink, device: torch.device) -> None:
        """Send over ``link``, which it owns."""
        self._layout, self._link, self._device = layout, link, device
        self._pending: list[_Push] = []

    def open(self) -> None:
        """Return when both ends of the link are there."""
        self._link.open()

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy a sample aside on the current stream."""
        copy = staged_copy(sample, self._layout, self._device)
        staged = self._link.new_event()
        staged.record(torch.get_device_module(self._device).current_stream(self._device))
        parts = copy.split(GrantInfo.decode(grant.payload).lengths) if copy.nbytes else ()
        self._pending.append(_Push(self._link, parts, staged))

    def take_pending(self) -> PendingSend:
        """Return what the last ``write`` has begun."""
        return self._pending.pop()

    def settle(self) -> None:
        """Return at once: what was copied aside is nobody else's."""

    def abandon(self) -> None:
        """Make pending and future sends raise PeerLost."""
        self._link.abort()

    def close(self) -> None:
        """Close the link."""
        self._link.close()
