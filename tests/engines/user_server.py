"""vLLM's server as a user starts it, by the command of the engine's page."""

import json
from pathlib import Path

from .page_server import PageServer, shell_block


class Server(PageServer):
    """vLLM's server as a user starts it, by the page's command."""

    def __init__(self, target: Path, first: Path, mine: Path, folder: Path) -> None:
        here = {
            "dtype": "float32",
            "max-model-len": 200,
            "kv-cache-memory-bytes": 64 << 20,
            "enforce-eager": True,  # the page says so of CPUs
            "tokens-only": True,
            "no-enable-prefix-caching": True,
            "no-enable-chunked-prefill": True,
        }
        super().__init__(shell_block("spec_engine_vllm"), folder, target, first, mine, here)

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, str]]:
        """Return the greedy text after each prompt, and the headers of the last answer."""
        texts, headers = [], {}
        for prompt in prompts:
            sampling = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
            fields = {"token_ids": prompt, "sampling_params": sampling}
            status, headers, body = self.ask("POST", "/inference/v1/generate", fields)
            assert status == 200, body
            texts.append(json.loads(body)["choices"][0]["token_ids"])
        return texts, headers
