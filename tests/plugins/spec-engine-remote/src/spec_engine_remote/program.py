"""The process that the target runs in. SubprocessEngine starts it as ``python -m spec_engine_remote.program``."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from spec_kit.hosting import CAPTURE_VARIABLE, EngineLink, FeatureExporter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from spec_kit.hosting import Fields


class Program:
    """The target, and an exporter if the program was started to capture."""

    def __init__(self, folder: str, dtype: str, ends: Sequence[int], layers: Sequence[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.ends = set(ends)
        self.states: dict[int, torch.Tensor] = {}
        self.exporter: FeatureExporter | None = None
        if address := os.environ.get(CAPTURE_VARIABLE):
            self.exporter = FeatureExporter(address)
        decoder = self.model.get_decoder()
        entered = [*decoder.layers, decoder.norm]
        for layer in layers:
            entered[layer].register_forward_pre_hook(self._keep(layer), with_kwargs=True)

    def _keep(self, layer: int) -> Callable[..., None]:
        """Return a hook that keeps the residual stream which enters ``layer``."""

        def hook(_: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            self.states[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    @torch.no_grad()
    def prefill(self, message: Fields) -> Fields:
        """Run each request, and export the states of its tokens: [T, N, H]."""
        assert self.exporter is not None
        dtype = self.exporter.schema.torch_dtype()
        for request_id, destinations, ids in message["requests"]:
            self.model.get_decoder()(torch.tensor([ids]), use_cache=False)
            states_TNH = torch.stack([self.states[layer] for layer in self.exporter.schema.layers], dim=1)
            self.exporter.export(request_id, destinations, ids, states_TNH.to(dtype))
        return {}

    @torch.no_grad()
    def decode(self, message: Fields) -> Fields:
        """Return the answer to one request."""
        sampling, ids, gaps = message["sampling"], list(message["prompt"]), []
        if sampling["top_p"] < 1:
            raise ValueError("top_p is not implemented")
        generator = torch.Generator()
        generator.seed() if message["seed"] is None else generator.manual_seed(message["seed"])
        stops = self.ends if sampling["stop_at_eos"] else set()
        while len(gaps) < sampling["max_new_tokens"] and not (gaps and ids[-1] in stops):
            logits_V = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
            first, second = logits_V.topk(2).values.tolist()
            gaps.append(first - second)
            if sampling["temperature"] == 0:
                ids.append(int(logits_V.argmax()))
            else:
                distribution_V = (logits_V / sampling["temperature"]).softmax(-1)
                ids.append(int(torch.multinomial(distribution_V, 1, generator=generator)))
        return {"ids": ids[len(message["prompt"]) :], "gaps": gaps}


def main() -> None:
    """Load the target, and answer until the engine is gone."""
    with EngineLink() as link, ThreadPoolExecutor(1) as thread:
        program = Program(**link.arguments)

        def on_thread(handle: Callable[[Fields], Fields]) -> Callable[[Fields], Awaitable[Fields]]:
            """Keep the event loop free: the link reads on while the target computes."""
            return lambda message: asyncio.get_running_loop().run_in_executor(thread, handle, message)

        link.ready(at_once=1)
        asyncio.run(link.serve({"prefill": on_thread(program.prefill), "decode": on_thread(program.decode)}))
        if program.exporter is not None:
            program.exporter.close()


if __name__ == "__main__":
    main()
