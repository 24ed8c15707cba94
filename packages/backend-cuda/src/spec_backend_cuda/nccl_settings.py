"""Compute the settings of NCCL that every process of a run needs."""

from __future__ import annotations

from collections.abc import Mapping

MEMORY, AUTOMATIC = "NCCL_CUMEM_ENABLE", "-2"
"""Environment variable for how NCCL allocates shared GPU memory, and its default. All ranks of a communicator need
the same value."""


def nccl_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``NCCL_CUMEM_ENABLE`` with its value in ``env``, or else with NCCL's default.

    All processes of a run get this value. If the variable is not set, SGLang sets it to another value in its
    own processes (0.5.16, ``_set_envs_and_config``). A trainer and SGLang then cannot form a communicator.
    """
    return {MEMORY: env.get(MEMORY, AUTOMATIC)}
