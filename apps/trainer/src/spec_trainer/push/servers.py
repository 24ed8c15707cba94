"""Connect to the running servers to which a draft is pushed, and check that a push can work."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError, EngineError, ProtocolError
from spec_core.foreign import cause
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.weight_sync import open_weight_transports
from spec_processes.sockets import check_secret
from spec_processes.sockets.addresses import bind, parse_address
from spec_trainer.base.disk import check_writable
from spec_trainer.configuration.push_options import transport_configs
from spec_trainer.configuration.server_url import check_distinct
from spec_trainer.push.background import in_background

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from spec_core import Backend, TargetSpec, WeightTransport
    from spec_kit.weight_sync import Publisher
    from spec_trainer.configuration.run import PushConfig
    from spec_trainer.push.request import PushRequest
    from spec_trainer.run.spec import RunParts, RunSpec


ANSWER_S = 60.0
"""Default timeout for a server's answer, in seconds."""


def connect_servers(urls: Sequence[str], timeout_s: float = ANSWER_S) -> dict[str, HttpReplica]:
    """Return address -> client of the server.

    Raise ConfigError for a malformed address, EngineError if a server does not answer.
    """
    servers: dict[str, HttpReplica] = {}
    for url, server in ask_servers(urls, timeout_s).items():
        if isinstance(server, EngineError):
            raise server
        servers[url] = server
    return servers


def ask_servers(urls: Sequence[str], timeout_s: float) -> dict[str, HttpReplica | EngineError]:
    """Ask all servers at the same time; return each server's client, or the error if it cannot be used.

    The result's keys are the addresses. Raise ConfigError for a malformed address or secret, or for two addresses
    of one server, before the secret is sent to any server.
    """
    token = _token()
    check_distinct(urls)

    def ask(url: str) -> HttpReplica | EngineError:
        try:
            return HttpReplica(url, token, timeout_s)
        except EngineError as error:
            return error

    asked = {url: in_background(partial(ask, url), "servers") for url in urls}
    return {url: answer.result() for url, answer in asked.items()}


def open_transports(backend: Backend, options: PushConfig | PushRequest) -> dict[str, WeightTransport]:
    """Return the weight transports that a push may use.

    Raise UsageError if there is none, if a requested transport cannot be used, or if its folder is not writable.
    """
    wanted: dict[str, object] = {"bucket_bytes": options.bucket_bytes, "folder": options.folder}
    values = {key: value for key, value in wanted.items() if value is not None}
    configs = transport_configs(options.options, "options")
    transports = open_weight_transports(backend, options.transport, values, configs)
    for transport in transports.values():
        folder = getattr(transport.config, "folder", None)
        if isinstance(folder, Path):  # another transport's ``folder`` may be of any type
            check_writable(folder, "folder for weights")
    if not transports:
        raise ConfigError("no weight transport can run here; spec-trainer plugins says what is installed")
    return transports


def open_publisher(
    backend: Backend, options: PushConfig | PushRequest, target: TargetSpec, device: torch.device
) -> Publisher:
    """Return a publisher of drafts for ``target`` that fills its buckets (send buffers) on ``device``.

    Raise UsageError if no weight transport can be used, or if this host cannot listen at the address.
    """
    from spec_kit.weight_sync import Publisher

    _check_listening(options.address)
    return Publisher(
        open_transports(backend, options),
        target.digest,
        device=device,
        address=options.address,
        fastest_first=not options.transport,
    )


def check_pushes(parts: RunParts) -> None:
    """Raise UsageError if a run's pushes cannot work with any server; connect to nothing."""
    push = parts.config.push
    if parts.config.train.push_every or parts.config.train.serve_every:
        _parsed(push.address)
        open_transports(parts.backend, push)
    if push.to:
        _token()


def check_sender(parts: RunParts) -> None:
    """Raise UsageError if this host cannot push to any server; connect to nothing."""
    _token()
    open_transports(parts.backend, parts.config.push)
    _check_listening(parts.config.push.address)


def check_servers(spec: RunSpec) -> None:
    """Raise UsageError or EngineError if a run cannot push, or if a server of ``push.to`` does not answer."""
    check_pushes(spec)
    check_listening(spec)
    if spec.config.push.to:
        connect_servers(spec.config.push.to)


def check_listening(spec: RunSpec) -> None:
    """Raise ConfigError if a run that pushes cannot listen at ``push.address``.

    If workers may be on other hosts, this is not checked here: the rank that pushes listens on its own host.
    """
    pushes = spec.config.train.push_every or spec.config.train.serve_every
    if pushes and not any(member.host for member in spec.members()):
        _check_listening(spec.config.push.address)


def _token() -> str:
    """Return the secret by which this process authenticates to the servers, from the environment.

    It is no configuration key, because the configuration is saved in the run directory, and no option,
    because every user of the host can see a command line.
    """
    token = os.environ.get(DRAFT_TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"environment variable {DRAFT_TOKEN_VARIABLE} is not set; give it the value that the servers have"
        )
    check_secret(token)
    return token


def _check_listening(address: str) -> None:
    """Raise ConfigError if this host cannot listen at ``host:port`` for the ranks of servers."""
    host, port = _parsed(address)
    with _named(address):
        bind(host, port).close()


def _parsed(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raise ConfigError if servers cannot connect to it."""
    with _named(address):
        host, port = parse_address(address)
        if host in ("0.0.0.0", "::"):
            raise ProtocolError("that is every interface; servers need the address of one")
        return host, port


@contextmanager
def _named(address: str) -> Generator[None]:
    try:
        yield
    except (OSError, UnicodeError, ProtocolError) as error:
        raise ConfigError(
            f"servers cannot connect to {address!r}: {cause(error)}; name host:port of this host, with port 0 "
            "for any free one"
        ) from error
