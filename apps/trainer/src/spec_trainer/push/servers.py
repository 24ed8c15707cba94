"""The running servers that a draft is pushed to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_core.hosting import HttpReplica
from spec_core.weight_sync import open_weight_transports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.run_spec import RunSpec

TOKEN_VARIABLE = "SPEC_DRAFT_TOKEN"
"""Environment variable with the secret that servers ask for; it is called the same where they run."""


def connect_servers(urls: Sequence[str]) -> dict[str, HttpReplica]:
    """Return the server at each address. Raise EngineError for one that does not answer, ConfigError for a wrong one.

    The secret that the servers ask for is in the environment, as it is for them: a configuration is kept in the run
    directory, and a command line is seen by every user of the host.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"environment variable {TOKEN_VARIABLE} is not set; give it the value that the servers were started with"
        )
    return {url: HttpReplica(url, token) for url in urls}


def check_servers(spec: RunSpec) -> None:
    """Raise UsageError or EngineError where a run could push to none of its servers from the start."""
    if spec.config.train.push_every:
        open_weight_transports(spec.backend, spec.config.push.transport)
        connect_servers(spec.config.push.to)
