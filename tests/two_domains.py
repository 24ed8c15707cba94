"""A target that has learnt two domains of text, drafts of both, and what a draft that follows has to reach."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

from spec_trainer.cli import app as cli

DOMAINS = {"old": range(3, 50), "new": range(50, 97)}
"""Tokens of each domain: each token has one successor, in its domain."""
WORDS = (
    "data.eval_samples=0", "train.schedule=constant", "train.lr=3e-3", "train.warmup_steps=5",
    "train.global_batch_tokens=512", "draft.num_steps=3", "draft.layers=[1,2,3]",
)  # fmt: skip
"""Configuration of drafts for the target below, in training and in ``follow``."""


def successors() -> list[int]:
    draw = random.Random(5)
    found = list(range(97))
    for domain in DOMAINS.values():
        tokens = list(domain)
        draw.shuffle(tokens)
        for one, other in zip(tokens, tokens[1:] + tokens[:1], strict=True):
            found[one] = other
    return found


def prompts(domain: str, num: int, seed: int) -> list[list[int]]:
    draw = random.Random(f"{domain} {seed}")
    return [[draw.choice(DOMAINS[domain]) for _ in range(6)] for _ in range(num)]


def save_target(base: Path, folder: Path) -> None:
    """Save a target of 97 tokens that has learnt both domains: random words, then one successor after the other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    follows, draw = successors(), random.Random(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        rows = []
        for _ in range(32):
            row = [draw.choice(DOMAINS[draw.choice(list(DOMAINS))]) for _ in range(2)]
            while len(row) < 12:
                row.append(follows[row[-1]])
            rows.append(row)
        ids = torch.tensor(rows)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


class Lab:
    """A target, and rows and drafts of both domains, each made once it is asked for."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        prompts: Callable[[str, int, int], list[list[int]]],
        answers: Callable[[list[list[int]]], list[list[int]]],
        words: Sequence[str] = WORDS,
        num_rows: int = 150,
    ) -> None:
        """``prompts(domain, num, seed)`` draws prompts; ``answers`` returns the target's own greedy answers."""
        self.folder, self.target, self.prompts, self.answers = folder, target, prompts, answers
        self._words, self._num_rows = words, num_rows

    @cache  # noqa: B019 (a module has one)
    def rows(self, domain: str) -> Path:
        """File of training data of a domain."""
        file = self.folder / f"{domain}.jsonl"
        asked = self.prompts(domain, self._num_rows, 1)
        with file.open("w") as rows:
            for prompt, answer in zip(asked, self.answers(asked), strict=True):
                mask = [0] * len(prompt) + [1] * len(answer)
                rows.write(json.dumps({"input_ids": prompt + answer, "loss_mask": mask}) + "\n")
        return file

    @cache  # noqa: B019 (a module has one)
    def draft(self, domain: str) -> Path:
        """Draft that has learnt a domain alone."""
        output = self.folder / domain
        words = [*self.words(), f"data.path={self.rows(domain)}", "train.steps=100", f"output={output}"]
        assert cli.run(["train", *words]) == 0
        return output / "draft"

    def words(self) -> list[str]:
        return [f"target={self.target}", *self._words]

    def follow(self, url: str, output: Path, *words: object, start: str = "old") -> list[str]:
        """Words of the command, with data to replay."""
        drafts = ["--draft-model", str(self.draft(start))]
        data = f"data.path={self.rows('old')}"
        return self.follow_anew(url, output, *drafts, data, *words)

    def follow_anew(self, url: str, output: Path, *words: object) -> list[str]:
        """Words of the command, without data and with fresh weights."""
        servers = ["--server", url, "--output", str(output)]
        return ["follow", *self.words(), "follow.poll_s=0.05", *map(str, words), *servers]


@dataclass(frozen=True)
class Regained:
    """Acceptance lengths on held-out prompts, by domain."""

    before: Mapping[str, float]
    """Lengths with the draft that was trained on the old domain."""
    after: Mapping[str, float]
    """Lengths with the same draft, after it has followed the traffic."""
    trained: float
    """Length on the new domain with a draft that was trained on it."""

    @property
    def share(self) -> float:
        """Part of the way from the old draft to the new domain's own that was regained."""
        return (self.after["new"] - self.before["new"]) / (self.trained - self.before["new"])

    @property
    def kept(self) -> float:
        """Part of the old domain's length that was kept."""
        return self.after["old"] / self.before["old"]

    def check(self) -> None:
        """Fail unless the change has a cost, nine tenths of it are regained, and the old domain has lost little."""
        assert self.before["new"] < self.before["old"], self
        assert self.before["new"] < self.trained - 0.2, (
            "the change of traffic costs too little to show anything"
        )
        assert self.share >= 0.9, self
        assert self.kept >= 0.95, self
