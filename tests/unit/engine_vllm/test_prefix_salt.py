"""A request is read with a salt, whatever the parts in which it comes; a client that has gone is told."""

import asyncio
import json
from typing import Any

from spec_engine_vllm.prefix_salt import salted

GONE = {"type": "http.disconnect"}


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the application receives."""

    async def all_of() -> list[dict[str, Any]]:
        left = iter(messages)

        async def receive() -> dict[str, Any]:
            return next(left)

        replay = await salted(receive, "salt")
        return [await replay(), *([await replay()] if messages[-1] is GONE else [])]

    return asyncio.run(all_of())


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_request_in_parts_gets_its_salt() -> None:
    body, end = read(part(b' {"prompt"', more=True), part(b': "x"}'), GONE)
    assert json.loads(body["body"]) == {"cache_salt": "salt", "prompt": "x"}
    assert end is GONE


def test_a_client_that_has_gone_in_the_midst_is_told() -> None:
    assert read(part(b'{"pro', more=True), GONE) == [part(b'{"pro', more=True), GONE]
