"""Find a target by its folder or its Hugging Face name, and explain why a name is not found."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from spec_core import foreign_errors
from spec_core.errors import ConfigError, RunError, TargetError
from spec_core.foreign import cause
from spec_core.wording import shortened

_ASK_S = 10.0
"""Seconds in which the hub must answer a question; the client's default is minutes, or no limit."""
_TAKE_S = 120.0
"""Seconds in which the hub must answer each part of an upload; the client's default is no limit."""

HUB_NAME = "a name of the hub is owner/name, such as Qwen/Qwen3-8B"
_FILES_OF_A_TARGET = ["*.json", "*.safetensors", "*.jinja", "*.model"]


def resolve_target(name: str) -> Path:
    """Return the target's folder: ``name`` if it exists, else the hub repository of that name.

    Raise TargetError, within seconds, if ``name`` is neither a folder nor an available repository.
    """
    folder = Path(os.path.expanduser(name))
    if os.path.exists(folder):
        return folder
    if not is_hub_name(name):
        raise TargetError(
            f"target {shortened(name, 200)} is not a folder: there is none of that name; {HUB_NAME}"
        )
    from huggingface_hub import snapshot_download

    problem = hub_problem(name, "model")
    try:
        with foreign_errors(TargetError, f"target {name!r}: the hub does not send it"):
            return Path(
                snapshot_download(
                    name, allow_patterns=_FILES_OF_A_TARGET, local_files_only=problem is not None
                )
            )
    except TargetError as error:
        if problem is None:
            raise
        what = f"target {name!r} is neither a folder nor a model that the hub gives"
        raise TargetError(f"{what}: there is no such folder, and {problem}") from error


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` has the form of a hub repository, owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def check_upload(name: str) -> None:
    """Ask the hub whether it takes a folder as the repository ``name``. Raise ConfigError if not."""
    if not is_hub_name(name):
        raise ConfigError(f"--push-to-hub={shortened(name, 200)}: {HUB_NAME}")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    hub = HfApi()
    try:
        with _answers_within(_ASK_S):
            hub.whoami()
    except LocalTokenNotFoundError as error:
        raise ConfigError(f"--push-to-hub={name}: log in with `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:
        raise ConfigError(f"--push-to-hub={name}: {_reason(error, hub.endpoint, 'model')}") from error


def upload_folder(folder: Path, name: str) -> str:
    """Send a folder to the hub as the repository ``name``, and return the repository's address.

    A repository that does not exist is made, and is private. Raise RunError if the hub does not take the folder.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        with _answers_within(_TAKE_S):
            address = hub.create_repo(name, private=True, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Add the draft")
    except Exception as error:
        raise RunError(
            f"{folder} is written, but {name} did not get it: {_reason(error, hub.endpoint, 'model')}; to try again: "
            f"hf upload --private {name} {shlex.quote(str(folder))}"
        ) from error
    return str(address)


@contextmanager
def _answers_within(seconds: float) -> Iterator[None]:
    """Let the hub's client wait only so long for each answer, where its calls take no limit of their own."""
    from huggingface_hub import get_session

    client = get_session()
    before = client.timeout
    client.timeout = seconds
    try:
        yield
    finally:
        client.timeout = before


def hub_problem(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Ask the hub once for a repository. Return why it is not available; None if it is available."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.repo_info(name, repo_type=kind, timeout=_ASK_S)
    except Exception as error:  # noqa: BLE001 (the client passes on what its libraries raise)
        return _reason(error, hub.endpoint, kind, "see to the network, or give a folder")
    return None


def _reason(error: Exception, endpoint: str, kind: str, remedy: str = "see to the network") -> str:
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
    return f"the hub at {endpoint} does not answer as one ({cause(error)}); {remedy}"
