"""Check whether a name is an available repository of the Hugging Face hub, and explain if it is not."""

from __future__ import annotations

from typing import Literal

from spec_core.foreign import cause

_ASK_S = 10.0
"""Seconds in which the hub must answer whether it has a repository; the client's default is minutes."""

HUB_NAME = "a name of the hub is owner/name, such as Qwen/Qwen3-8B"


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` has the form of a hub repository, owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def hub_problem(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Ask the hub once for a repository. Return why it is not available now, or None if it is."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.repo_info(name, repo_type=kind, timeout=_ASK_S)
    except Exception as error:  # noqa: BLE001 (the client passes on what its libraries raise)
        return _reason(error, hub.endpoint, kind)
    return None


def _reason(error: Exception, endpoint: str, kind: str) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids asking the hub"
    if isinstance(error, GatedRepoError):
        return f"it is gated: ask for access at {endpoint}, then log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such {kind}, or it is private: log in with `hf auth login`"
    if isinstance(error, HfHubHTTPError):
        return f"the hub at {endpoint} refuses: {cause(error)}"
    return (
        f"the hub at {endpoint} does not answer as one ({cause(error)}); see to the network, or give a folder"
    )
