"""Requests to an ASGI application, as vLLM's server hands them over."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


def bearer(token: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()


async def ask(
    app: Callable[..., Any],
    path: str,
    *headers: tuple[bytes, bytes],
    body: bytes = b"{}",
    method: str = "POST",
    llm: object = None,
    prefix: str = "",
) -> list[dict[str, Any]]:
    """Return the messages that the application sends. A body that is not short comes in two parts.

    ``prefix``: the ``root_path`` of a server behind a proxy.
    """
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": prefix + path,
        "root_path": prefix,
        "query_string": query.encode(),
        "headers": list(headers),
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=llm)),
    }
    parts = [body[:5], body[5:]] if len(body) > 5 else [body]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def statuses(sent: Sequence[dict[str, Any]]) -> list[int]:
    return [message["status"] for message in sent if message["type"] == "http.response.start"]
