"""Compare on a GPU what a stock vLLM server guesses with what our proposer guesses; print one JSON document. No test.

::

    python -m benchmarks.gpu.vllm_guesses --target DIR --draft DIR [DIR …] --output DIR -- …

For each draft a server starts as a user starts it, with CUDA graphs. Prompts go one at a time. Wherever the server's
drafter was asked, the proposer of engine ``hf`` guesses from the target's states in float32: ``same_guesses`` is the
share of rounds in which all guesses are equal, ``same_first`` of those whose first guess is. The server computes in
bfloat16, so near ties may differ. ``acceptance_length`` is what the server's rounds come to, ``hf_acceptance_length``
the engine ``hf``'s on the same prompts; ``as_plain`` counts texts that are the same without a draft.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch

from spec_core import Backend, EngineContext, plugins
from spec_core.records import SamplingParams
from spec_engine_hf.decoding import DraftSource
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_engine_hf.hf_model import HfModel
from spec_kit.targets import read_target

from .vllm_updates import DRAFT_TOKENS, NEW_TOKENS, score, serving

log = logging.getLogger("guesses")


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--target", type=Path, required=True)
    words.add_argument("--draft", type=Path, nargs="+", required=True)
    words.add_argument("--prompts", type=Path, help="JSONL with prompt_ids; random prompts without")
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--start-s", type=float, default=250.0)
    words.add_argument("--backend", default="cuda")
    words.add_argument("--dtype", default="bfloat16")
    words.add_argument("--num-prompts", type=int, default=40)
    words.add_argument("words", nargs="*", help="of the server")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    prompts = _prompts(given)
    document = {str(folder): _measure(given, folder.resolve(), prompts) for folder in given.draft}
    print(json.dumps(document, indent=2))


def _prompts(given) -> list[list[int]]:
    if given.prompts is None:
        from .sglang_updates import random_prompts

        return random_prompts(read_target(given.target).vocab_size, given.num_prompts)
    rows = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    return [row["prompt_ids"] for row in rows][: given.num_prompts]


def _measure(given, folder: Path, prompts: list[list[int]]) -> dict:
    with serving(given, folder, given.output.resolve() / folder.parent.name) as server:
        answers = server.answers(prompts)
        found = {"start_s": server.start_s}
    device = torch.device("cuda" if given.backend == "cuda" else "cpu")
    replay = _Replay(given.target, folder, device)
    rounds = [
        pair
        for prompt, (text, guesses) in zip(prompts, answers, strict=True)
        for pair in replay(prompt, text, guesses)
    ]
    found["rounds"] = len(rounds)
    found["same_guesses"] = sum(theirs == ours for theirs, ours, _ in rounds) / max(1, len(rounds))
    found["same_first"] = sum(theirs[:1] == ours[:1] for theirs, ours, _ in rounds) / max(1, len(rounds))
    found["acceptance_length"] = 1 + sum(accepted for *_, accepted in rounds) / max(1, len(rounds))
    return found | _by_hf(given, folder, prompts, answers)


def _by_hf(given, folder: Path, prompts: list[list[int]], answers) -> dict:
    """Return the acceptance of engine hf on these prompts, and how near the server's texts are to the target's."""
    backend = plugins.load_available(Backend, given.backend)
    context = EngineContext(backend=backend(backend.Config()))
    plain = SamplingParams(max_new_tokens=NEW_TOKENS, stop_at_eos=False)
    drafted = SamplingParams(max_new_tokens=NEW_TOKENS, num_draft_tokens=DRAFT_TOKENS, stop_at_eos=False)
    with HfEngine.create(HfConfig(), read_target(given.target), context) as engine:
        without = [list(answer.token_ids) for answer in engine.generate(prompts, plain)]
        engine.load_draft(folder)
        engine.generate(prompts, drafted)
        acceptance = engine.acceptance().acceptance_length
    same = sum(text == own for (text, _), own in zip(answers, without, strict=True))
    return {
        "hf_acceptance_length": acceptance,
        "as_plain": f"{same} of {len(prompts)}",
        "texts": score(given.target, prompts, {"served": answers}),
    }


class _Replay:
    """Replays an answer: what our proposer guesses wherever the server's drafter was asked."""

    def __init__(self, target: Path, draft: Path, device: torch.device) -> None:
        self._model = HfModel(read_target(target), device, "float32")
        self._draft = DraftSource.of_export(draft, self._model)
        self._hidden = _States(target, device)

    def __call__(self, prompt, answer, guesses):
        tokens, known, proposed_for = [*prompt, *answer], len(prompt) + 1, 0
        proposer, hidden_TNH = self._draft.new_proposer(), self._hidden(tokens)[:, list(self._draft.layers)]
        for theirs in map(tuple, guesses):
            if known + len(theirs) >= len(tokens):
                return
            proposer.extend(tokens[proposed_for + 1 : known], hidden_TNH[proposed_for : known - 1])
            proposed_for = known - 1
            ours = tuple(proposer.propose(len(theirs), 0.0, torch.Generator(hidden_TNH.device)).token_ids)
            following = tokens[known : known + len(theirs)]
            wrong = (i for i, (a, b) in enumerate(zip(theirs, following, strict=True)) if a != b)
            accepted = next(wrong, len(theirs))
            known += accepted + 1
            yield theirs, ours, accepted


class _States:
    """The residual stream before each layer of the target, by Transformers in float32."""

    def __init__(self, target: Path, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self._model.device)
        return torch.stack(self._model(ids, output_hidden_states=True).hidden_states, 2)[0]


if __name__ == "__main__":
    main()
