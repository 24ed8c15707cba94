"""Add a salt to requests: vLLM shares cached prefixes only between requests with the same salt.

Cached prefix blocks also hold the draft's keys and values. If a diverged draft has computed them, they make
the guesses of every later draft after this prefix worse (docs/decisions/020). vLLM can empty its cache only
while no request runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]

SALTED_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate")
"""vLLM's HTTP routes whose requests accept the field ``cache_salt``."""


async def salted(receive: Receive, salt: str) -> Receive:
    """Read the HTTP request from ``receive``; return a ``receive`` that yields it with the salt added."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    if messages[-1]["type"] == "http.request":  # otherwise the client has disconnected
        body = b"".join(message.get("body", b"") for message in messages)
        messages = [{"type": "http.request", "body": with_salt(body, salt)}]

    async def replay() -> dict[str, Any]:
        return messages.pop(0) if messages else await receive()

    return replay


def with_salt(body: bytes, salt: str) -> bytes:
    """Return the JSON object ``body`` with ``cache_salt`` as its first field.

    A body that already has the field stays unchanged.
    """
    found = body.strip()
    if not found.startswith(b"{") or b'"cache_salt"' in found:
        return body
    rest = found[1:].lstrip()
    comma = b"" if rest.startswith(b"}") else b", "
    return b'{"cache_salt": "' + salt.encode() + b'"' + comma + rest
