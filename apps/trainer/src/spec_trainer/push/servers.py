"""The running servers that a draft is pushed to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError, ProtocolError
from spec_core.foreign import cause
from spec_core.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_core.rendezvous import bind, parse_address
from spec_core.weight_sync import open_weight_transports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.run_spec import RunSpec


def connect_servers(urls: Sequence[str]) -> dict[str, HttpReplica]:
    """Return the server at each address. Raise EngineError for one that does not answer, ConfigError for a wrong one.

    The secret that the servers ask for is in the environment, as it is for them: a configuration is kept in the run
    directory, and a command line is seen by every user of the host.
    """
    token = os.environ.get(DRAFT_TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"environment variable {DRAFT_TOKEN_VARIABLE} is not set; give it the value that the servers have"
        )
    return {url: HttpReplica(url, token) for url in urls}


def check_address(address: str) -> None:
    """Raise ConfigError where this host cannot listen at ``host:port`` for the ranks of servers."""
    try:
        host, port = parse_address(address)
        if host in ("0.0.0.0", "::"):
            raise ProtocolError("that is every interface; servers need the address of one")
        bind(host, port).close()
    except (OSError, OverflowError, UnicodeError, ProtocolError) as error:
        raise ConfigError(
            f"servers cannot connect to {address!r}: {cause(error)}; name host:port of this host, with port 0 "
            "for any free one"
        ) from error


def check_servers(spec: RunSpec) -> None:
    """Raise UsageError or EngineError where a run could push to none of its servers from the start."""
    if spec.config.train.push_every:
        check_address(spec.config.push.address)
        open_weight_transports(spec.backend, spec.config.push.transport)
        connect_servers(spec.config.push.to)
