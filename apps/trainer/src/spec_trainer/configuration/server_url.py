"""This module defines the types of configured servers' URLs, and says when two URLs are of one server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

from spec_core.errors import ConfigError
from spec_core.wording import shown

_PORTS = {"http": 80, "https": 443}
_OF_THIS_HOST = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Host of a URL -> the address that it reaches."""


def check_distinct(urls: Iterable[str]) -> None:
    """Raise ConfigError if a URL is malformed, or if two of them, however written, are of the same server."""
    known: dict[tuple[str, str, int, str], str] = {}
    for url in urls:
        place = _place(url)
        if place in known:
            raise ConfigError(f"{shown(known[place])} and {shown(url)} are the same server; name each once")
        known[place] = url


def same_server(one: str, other: str) -> bool:
    """Return whether two URLs are of the same server."""
    return _place(one) == _place(other)


def _place(url: str) -> tuple[str, str, int, str]:
    from spec_processes.sockets import server_address

    parts = server_address(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS[parts.scheme]
    return parts.scheme, _OF_THIS_HOST.get(host, host), port, parts.path.rstrip("/")


def _checked(url: str) -> str:
    _place(url)
    return url


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    check_distinct(urls)
    return urls


ServerUrl = Annotated[str, AfterValidator(_checked)]
"""The URL of a server, such as http://127.0.0.1:8000."""
ServerUrls = Annotated[tuple[ServerUrl, ...], AfterValidator(_distinct)]
"""The URLs of servers, each of another server."""
