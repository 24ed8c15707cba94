"""Device and stream of a thread: a new one begins with the first device, or, on some hardware, with none."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spec_kit.own_stream import OwnStream

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch


def use_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread, where there are several of its type."""
    import torch

    if str(device) != device.type:  # it has a number
        torch.get_device_module(device).set_device(device)


@contextmanager
def beside(device: torch.device) -> Generator[None]:
    """Make ``device`` current, queue work on a stream that nobody else uses meanwhile, and wait for it at the end.

    So the work waits for nothing that the process trains or serves, nor that for it. What torch's allocator has
    cached for one stream is for no other: an update on a new one each time would take new memory each time.
    """
    import torch

    use_device(device)
    if torch.empty(0, device=device).is_cpu:
        yield
        return
    own = OwnStream(device)
    with torch.get_device_module(device).stream(own.stream):
        yield
    own.stream.synchronize()
    own.close()


def queued_before(device: torch.device) -> Any:
    """Return an event behind what is queued on the device's current stream; a thread that waits for it sleeps."""
    import torch

    module = torch.get_device_module(device)
    event = module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event
