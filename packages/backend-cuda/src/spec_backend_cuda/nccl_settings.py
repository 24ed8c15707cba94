"""Compute the settings of NCCL that every process of a run needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MEMORY, AUTOMATIC = "NCCL_CUMEM_ENABLE", "-2"
"""Environment variable for how NCCL allocates shared GPU memory, and its default. All ranks of a communicator need
the same value."""


def nccl_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's memory setting in ``env``, or its default, as an environment variable.

    If no value is set, SGLang sets another value for its processes (0.5.16, ``_set_envs_and_config``). A
    trainer could then not form a communicator with them.
    """
    return {MEMORY: env.get(MEMORY, AUTOMATIC)}
