"""``python vllm_tokenize.py TARGET [LENGTH] < requests``: what ``POST /tokenize`` of ``vllm launch render`` answers.

Both are JSON lists. In a process of its own: importing vLLM changes the one that does.
"""

import asyncio
import json
import sys
from typing import Any

import httpx
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.utils.argparse_utils import FlexibleArgumentParser


async def answer(target: str, length: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    words = ["--model", target, "--trust-request-chat-template", "--max-model-len", length]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    app = build_app(args, ("render",))
    config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
    await init_render_app_state(config, app.state, args)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
        return [
            (await client.post("/tokenize", json={"model": target, **fields})).json() for fields in requests
        ]


if __name__ == "__main__":
    target, length = (*sys.argv[1:], "512")[:2]
    print(json.dumps(asyncio.run(answer(target, length, json.load(sys.stdin)))))
