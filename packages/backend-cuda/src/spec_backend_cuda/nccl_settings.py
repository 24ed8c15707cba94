"""NCCL's settings that every process of a run needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MEMORY, AUTOMATIC = "NCCL_CUMEM_ENABLE", "-2"
"""Variable for how NCCL allocates what GPUs share, and its default. Both ends of a communicator need the same."""


def nccl_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the setting, even where it is the default.

    SGLang chooses another one for its processes where there is none (0.5.16, ``_set_envs_and_config``), and a trainer
    could not make a communicator with them.
    """
    return {MEMORY: env.get(MEMORY, AUTOMATIC)}
