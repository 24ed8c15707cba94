"""The quickstart's target has two domains, too: prose, which is the old one, and code, which is the new one."""

import random

from tokenizers import Tokenizer

from spec_trainer.cli.quickstart.corpus import python_documents
from spec_trainer.cli.quickstart.run import QuickstartSize, prepare_files

CODE = ("def ", "class ", "async def ", "@")
"""Beginnings of documents that are code; the other ones are docstrings and topics of ``help()``."""
MOST_DOCUMENTS = 500
PROMPT_TOKENS = 24
STRIDE = 48
"""Tokens from the beginning of a prompt to the beginning of the next one."""
SEEDS = 4
WORDS = (
    "data.eval_samples=0", "train.schedule=constant", "train.lr=5e-3", "train.warmup_steps=10",
    "train.global_batch_tokens=1024", "optimizer.name=muon", "optimizer.matrix_rate=2.857",
    "optimizer.betas=[0.8,0.95]", "draft.num_steps=3", "draft.step_decay=1.0",
)  # fmt: skip
"""The quickstart's configuration of a draft, with smaller steps at a constant rate."""


class ProseAndCode:
    """The quickstart's target, which its cache keeps, and prompts from the text that it has learnt."""

    def __init__(self) -> None:
        self.target = prepare_files(QuickstartSize()).target
        documents = python_documents()
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        draw = random.Random(0)
        self._prompts: dict[str, list[list[int]]] = {}
        for domain in ("old", "new"):
            texts = [one.text for one in documents if one.text.startswith(CODE) == (domain == "new")]
            texts = draw.sample(texts, min(len(texts), MOST_DOCUMENTS))
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            found = dict.fromkeys(prompt for encoding in encodings for prompt in windows(encoding.ids))
            self._prompts[domain] = draw.sample(list(map(list, found)), len(found))

    def prompts(self, domain: str, num: int, seed: int) -> list[list[int]]:
        """Return prompts of a domain; two seeds, which are below ``SEEDS``, have none in common."""
        found = self._prompts[domain][seed::SEEDS][:num]
        assert len(found) == num, f"{domain} has {len(found)} prompts"
        return found


def windows(ids: list[int]) -> list[tuple[int, ...]]:
    """Cut prompts out of the tokens of a text."""
    places = range(0, len(ids) - PROMPT_TOKENS + 1, STRIDE)
    return [tuple(ids[place : place + PROMPT_TOKENS]) for place in places]
