"""Reservoir: requests to train on and requests to judge by, in memory alone, and the draw of a cycle's samples."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_kit.hosting import LiveRequest
    from spec_trainer.config import FollowConfig


@dataclass(frozen=True)
class _Kept:
    number: int
    """How many requests had come before it."""
    input_ids: np.ndarray
    num_prompt: int


class Reservoir:
    """Keeps the newest requests, one for each prompt. A hash of the prompt decides what a request is for."""

    def __init__(self, config: FollowConfig, *, longest: int, vocab_size: int, seed: int) -> None:
        """Keep nothing yet; ``longest`` is the most tokens of a sample."""
        self._config, self._longest, self._vocab_size, self._seed = config, longest, vocab_size, seed
        self._train: dict[bytes, _Kept] = {}
        self._held_out: dict[bytes, _Kept] = {}
        self.num_seen = 0
        """Requests that have come."""
        self.num_fresh = 0
        """Requests to train on that are new since the last draw."""
        self.left_out: Counter[str] = Counter()
        """Requests that are of no use, by the reason."""

    def add(self, request: LiveRequest) -> None:
        """Keep a request in the place of an earlier one with the same prompt, or of the oldest."""
        self.num_seen += 1
        tokens = [*request.prompt, *request.answer]
        if max(tokens) >= self._vocab_size:
            self.left_out["other_vocabulary"] += 1
        elif len(request.prompt) >= self._longest:
            self.left_out["long_prompt"] += 1
        else:
            ids = np.array(tokens[: self._longest], dtype=np.int32)
            self._keep(request.prompt, _Kept(self.num_seen - 1, ids, len(request.prompt)))

    def draw(self, replayed: Sequence[Sample], done_steps: int) -> Dataset:
        """Return what a cycle trains on: recent requests more often, and a share of ``replayed``.

        They are a function of what was added, the seed and the steps done.
        """
        kept = list(self._train.values())
        num_live = min(len(kept), self._config.passes * self.num_fresh)
        ages = self.num_seen - np.array([one.number for one in kept])
        live = [
            kept[place]
            for place in self._chosen(0.5 ** (ages / self._config.half_life), num_live, done_steps)
        ]
        self.num_fresh = 0
        share = self._config.replay
        num_replayed = min(len(replayed), round(num_live * share / (1 - share)))
        again = self._chosen(np.ones(len(replayed)), num_replayed, done_steps, 1)
        masks = [replayed[place].loss_mask for place in again]
        return _dataset(
            [*(one.input_ids for one in live), *(replayed[place].input_ids for place in again)],
            [*(_answer_mask(one) for one in live), *masks],
        )

    def held_out(self) -> Dataset:
        """Return the requests to judge by, oldest first; they are in ``train``."""
        kept = list(self._held_out.values())
        return _dataset([one.input_ids for one in kept], [_answer_mask(one) for one in kept])

    def _keep(self, prompt: Sequence[int], one: _Kept) -> None:
        digest = hashlib.blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
        is_held_out = int.from_bytes(digest[:8], "little") < self._config.held_out * 2**64
        place, most = (
            (self._held_out, self._config.window) if is_held_out else (self._train, self._config.kept)
        )
        if place.pop(digest, None) is None and not is_held_out:
            self.num_fresh += 1
        elif not is_held_out:
            self.left_out["same_prompt"] += 1
        place[digest] = one
        if len(place) > most:
            del place[next(iter(place))]

    def _chosen(self, weights: np.ndarray, num: int, *stream: int) -> list[int]:
        """Return ``num`` different places in order, each likelier by its weight (Efraimidis and Spirakis, 2006)."""
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, *stream]))
        uniform = (bits.random_raw(len(weights)) >> 11).astype(np.float64) * 2.0**-53
        keys = np.log(np.maximum(uniform, 2.0**-54)) / np.maximum(weights, 1e-300)
        return sorted(np.argsort(-keys, kind="stable")[:num].tolist())


def _answer_mask(one: _Kept) -> np.ndarray:
    return np.arange(len(one.input_ids)) >= one.num_prompt


def _dataset(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Dataset:
    samples = tuple(
        Sample(number, input_ids, mask, f"live sample {number}")
        for number, (input_ids, mask) in enumerate(zip(ids, masks, strict=True))
    )
    return Dataset(samples, (), DataReport())
