"""This module has the options of ``spec-trainer evaluate``. It imports little, for a fast start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spec_core.errors import ConfigError
from spec_core.wording import shortened
from spec_trainer.base.option_values import check_least


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The draft and target, or the running server, to measure; the prompts; and how to measure."""

    target: str = ""
    """Folder or hub id of the target."""
    draft_model: Path | None = None
    """Exported draft folder."""
    draft: str = ""
    """Kind of draft that --breakdown measures with random weights, such as eagle3, instead of draft-model."""
    server: str = ""
    """Address of a running server that serves a draft, such as http://127.0.0.1:8000, instead of target and draft."""
    baseline_server: str = ""
    """Address of a server of the same target without a draft, to compare with."""
    prompts: Path | None = None
    """Data file; the prompt of each row is everything before the last answer."""
    bench: str = ""
    """Benchmarks to ask instead of a data file, such as mt_bench,gsm8k:200; a number limits the rows of a
    benchmark."""
    bench_data: Path | None = None
    """Folder with the benchmarks' rows, in files such as NAME.jsonl; by default the rows come from the hub."""
    engine: str = "hf"
    """Engine that runs the target."""
    backend: str = "cpu"
    """Hardware; a backend plugin."""
    num_draft_tokens: str = ""
    """Number of tokens that the draft proposes per round. By default all that it guesses in one pass (block drafts,
    P-EAGLE); else 4, or as many as it was trained to guess ahead if that is less. Several numbers, such as 1,2,3,5,7,
    are compared at each concurrency; the other figures belong to the best of them."""
    max_new_tokens: int = 128
    """Largest number of new tokens of each answer."""
    temperature: float | None = None
    """Temperature of the sampled answers; greedy answers are always measured, and 0 measures only them. If a
    temperature is given, its figures are at the document's top level. By default the greedy figures are, and 1.0 is
    measured as well."""
    concurrency: str = ""
    """Numbers of concurrent answers at which to measure the speed, such as 1,8,32."""
    stop_at_eos: bool = True
    """End an answer at the target's end token; otherwise every answer has max-new-tokens tokens."""
    untrained: bool = False
    """Also measure an untrained draft of the same shape, in one more pass."""
    by_length: bool = False
    """Show the figures by the prompts' length in tokens, instead of by benchmark."""
    breakdown: bool = False
    """Instead of the draft's figures, measure what a token costs without a draft and a round with one, for several
    numbers of guesses: it says which acceptance length a draft needs to pay on this machine."""
    seed: int = 0
    """Seed of sampling."""
    timeout_s: float = 600.0
    """Longest time for one answer of a server."""
    card: bool = False
    """Also write the figures into the model card (README.md) in the draft's folder."""
    report: Path | None = None
    """File to write the figures and plots to, as one page of HTML that needs no network."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range, and for options that do not go together."""
        from spec_trainer.plan import combinations

        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("timeout_s", 0.1)):
            check_least(name, getattr(self, name), least)
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed={self.seed}: expected an integer of at most 64 bits")
        _check_numbers("--concurrency", self.concurrency, "1,8,32")
        _check_numbers("--num-draft-tokens", self.num_draft_tokens, "3 or 1,2,3,5")
        combinations.refuse(combinations.EVALUATE, self)

    @property
    def draft_folder(self) -> Path:
        """The exported draft folder; only for a request without ``server``."""
        assert self.draft_model is not None, "the request was checked when it was made"
        return self.draft_model

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The numbers in ``concurrency``, without duplicates."""
        return _numbers(self.concurrency)

    @property
    def draft_token_counts(self) -> tuple[int, ...]:
        """The numbers in ``num_draft_tokens``, without duplicates; empty for the draft's default."""
        return _numbers(self.num_draft_tokens)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(int, text.split(",")))) if text else ()


def _check_numbers(option: str, text: str, example: str) -> None:
    """Raise ConfigError unless ``text`` is empty or has positive integers between commas."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and len(word) < 6 and int(word) > 0 for word in words):
        raise ConfigError(
            f"{option}={shortened(text, 200)}: expected positive integers below 100000, such as {example}"
        )
