"""Compute settings of torch's memory allocator, and limit the memory of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the environment variable with the settings: the name since torch 2.9, and the older name, which
torch still reads."""
GIB = 1 << 30


def allocator_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited settings with ``expandable_segments`` off, even if nothing was inherited.

    Other processes can open memory of expandable segments only with a capability that containers lack, so
    that engines that share tensors between processes would fail. The explicit value keeps other code from
    turning the setting on later.
    """
    return {name: _without_expandable(environ.get(name, "")) for name in SETTINGS if name in environ} or {
        SETTINGS[1]: _without_expandable("")
    }


def _without_expandable(settings: str) -> str:
    remaining = [
        part for part in settings.split(",") if part and not part.strip().startswith("expandable_segments")
    ]
    return ",".join([*remaining, "expandable_segments:False"])


def limit_memory(fraction: float, device: torch.device) -> None:
    """Limit the memory of torch's allocator to ``fraction`` of the device's memory.

    Raise ConfigError if ``fraction`` is not above 0 and at most 1, or if other processes leave less free
    memory than this.
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
