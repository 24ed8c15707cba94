"""What NCCL must be told in every process of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MEMORY, AUTOMATIC = "NCCL_CUMEM_ENABLE", "-2"
"""How NCCL allocates what GPUs share, and its default. Both ends of a communicator need the same."""


def nccl_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Said even where it is the default: SGLang chooses another one for its processes unless it is said (0.5.16,
    ``_set_envs_and_config``), and a trainer could not make a communicator with them."""
    return {MEMORY: env.get(MEMORY, AUTOMATIC)}
