"""A target that has two domains of text, drafts of each, and servers whose traffic a draft follows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from spec_core.records import AcceptanceCounters
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from ... import two_domains
from ...two_domains import DOMAINS, prompts
from .. import draft_server, live_server

TOO_LARGE = 2
"""Token of no domain, whose embedding float16 does not hold: the target's states of it are NaN there."""


@pytest.fixture(scope="session")
def target(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-domains")
    two_domains.save_target(make_target("llama", num_hidden_layers=4), folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[TOO_LARGE] = 1e5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def answers(target: Path) -> Callable[[list[list[int]]], list[list[int]]]:
    """Returns the target's own greedy answers, each decoded once."""
    engine = draft_server.new_engine(target)
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(asked: list[list[int]]) -> list[list[int]]:
        new = [prompt for prompt in asked if tuple(prompt) not in known]
        for prompt, generation in zip(new, engine.generate(new, draft_server.PLAIN), strict=True):
            known[tuple(prompt)] = draft_server.tokens([generation])[0]
        return [known[tuple(prompt)] for prompt in asked]

    return answer


class Lab(two_domains.Lab):
    """Data and drafts of both domains, and what a draft is worth."""

    def acceptance_length(self, draft: Path, domain: str) -> float:
        """Decode with a draft and return its acceptance length; the answers are the target's own."""
        asked = prompts(domain, 40, 2)
        with draft_server.new_engine(self.target) as engine:
            engine.load_draft(draft)
            answers = engine.generate(asked, draft_server.DRAFTING)
        assert draft_server.tokens(answers) == self.answers(asked)
        return sum((answer.acceptance for answer in answers), AcceptanceCounters()).acceptance_length

    def acceptance_lengths(self, draft: Path) -> dict[str, float]:
        return {domain: self.acceptance_length(draft, domain) for domain in DOMAINS}


@pytest.fixture(scope="session")
def lab(target: Path, answers: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("follow"), target, prompts, answers)


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, draft_server.TOKEN)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')


@pytest.fixture
def url(lab: Lab) -> Iterator[str]:
    """A server in a process of its own."""
    with draft_server.serving(lab.target, lab.draft("old"), live_server.__file__, 0) as url:
        yield url


@pytest.fixture
def url_here(lab: Lab) -> Iterator[str]:
    """A server in this process, for tests in which only its answers count."""
    with live_server.serving(lab.target, lab.draft("old")) as url:
        yield url
