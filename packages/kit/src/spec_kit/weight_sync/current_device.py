"""Set the current device and stream of a thread.

A new thread starts with the first device as the current device, or with none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spec_kit.own_stream import OwnStream

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch


def use_device(device: torch.device) -> None:
    """Make ``device`` the current device of this thread, if it has an index."""
    import torch

    if str(device) != device.type:  # the name has an index
        torch.get_device_module(device).set_device(device)


@contextmanager
def separate_stream(device: torch.device) -> Generator[None]:
    """Run the block on an exclusive stream of ``device``, and synchronize the stream at the end.

    So the block and the process's training or serving do not wait for each other. The stream is reused, because
    torch's allocator caches memory per stream: an update on a new stream would allocate new memory each time.
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
    """Return an event recorded after the work that is queued on the device's current stream.

    A thread that waits for the event sleeps instead of polling.
    """
    import torch

    module = torch.get_device_module(device)
    event = module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event
