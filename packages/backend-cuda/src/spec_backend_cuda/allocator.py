"""Memory of a process: settings of torch's allocator, and the limit on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name since torch 2.9, and the older one, which it still reads."""
GIB = 1 << 30


def allocator_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited settings with ``expandable_segments`` off, also where nothing was inherited.

    Another process can open memory from such segments only with a capability that containers lack, so libraries
    that share tensors (engines among them) fail on it. The explicit value keeps anything from turning it on
    later.
    """
    return {name: _without_expandable(environ.get(name, "")) for name in SETTINGS if name in environ} or {
        SETTINGS[1]: _without_expandable("")
    }


def _without_expandable(settings: str) -> str:
    kept = [
        part for part in settings.split(",") if part and not part.strip().startswith("expandable_segments")
    ]
    return ",".join([*kept, "expandable_segments:False"])


def limit_memory(fraction: float, device: torch.device) -> None:
    """Cap what torch's allocator takes at ``fraction`` of the device's memory.

    Raises ConfigError if it is no fraction, or if others have taken so much of the device that it does not fit
    any more.
    """
    import torch

    if not 0 < fraction <= 1:
        raise ConfigError(f"a memory limit is a fraction above 0 and at most 1 of the device, not {fraction}")
    free, total = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)
    if fraction < 1 and fraction * total > available:
        raise ConfigError(
            f"{fraction:.2f} of {device} is {fraction * total / GIB:.1f} GiB, but of its {total / GIB:.1f} GiB only "
            f"{available / GIB:.1f} are free; lower placement.trainer_fraction and placement.engine_fraction"
        )
    torch.cuda.set_per_process_memory_fraction(fraction, device)
