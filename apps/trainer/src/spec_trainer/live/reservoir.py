"""Reservoir keeps live requests in memory for training and judging, and draws each cycle's samples."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.live.kept_request import KeptRequest, KeptRequests
from spec_trainer.live.labels import LabelCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from spec_kit.live_traffic.live_requests import LiveRequest
    from spec_trainer.configuration.follow import FollowConfig


class Reservoir:
    """Keeps the newest request of each prompt. A hash of the prompt decides if a request is held out."""

    def __init__(
        self,
        config: FollowConfig,
        *,
        longest: int,
        vocab_size: int,
        seed: int,
        image_token_id: int | None = None,
    ) -> None:
        """Create a reservoir without requests.

        ``longest``: the largest number of tokens of a sample; a longer answer is cut, a longer prompt left
        out.
        """
        self._config = config
        self._longest = longest
        self._vocab_size = vocab_size
        self._seed = seed
        self._image_token_id = image_token_id
        self._train: dict[bytes, KeptRequest] = {}
        self._held_out: dict[bytes, KeptRequest] = {}
        self.labels = LabelCounts()
        """Labels of the requests added so far."""
        self.num_seen = self.num_new = 0
        """``num_seen``: number of requests added so far. ``num_new``: the same without requests of earlier
        commands."""
        self.num_fresh = 0
        """Number of training requests added since the last draw."""
        self._num_state_bytes = 0
        self.left_out: Counter[str] = Counter()
        """Number of unusable requests, by reason."""

    @property
    def oldest(self) -> int:
        """Number of requests that arrived before the oldest training request that is kept."""
        return next((one.number for one in self._train.values()), self.num_seen)

    def restore(self, kept: KeptRequests) -> None:
        """Add the requests that an earlier command kept to this reservoir, which must be empty.

        A request is left out if ``follow.held_out`` now assigns it to the other group (training or held out).
        """
        for was_held_out, requests in enumerate((kept.train, kept.held_out)):
            for one in requests:
                digest, is_held_out = self._purpose(one.input_ids[: one.num_prompt].tolist())
                if is_held_out == was_held_out:
                    labelled = replace(one, label=self.labels.bounded(one.label))
                    self._place(digest, is_held_out, labelled)
        self.num_seen = kept.num_seen
        self.num_fresh = min(kept.num_fresh, len(self._train))

    @property
    def kept(self) -> KeptRequests:
        """All requests that are kept, oldest first, and the counters."""
        train, held_out = tuple(self._train.values()), tuple(self._held_out.values())
        return KeptRequests(train, held_out, self.num_seen, self.num_fresh)

    def add(self, request: LiveRequest, states: Tensor | str | None = None) -> None:
        """Add a request, in place of an earlier request with the same prompt or, if full, of the oldest one.

        ``states``: hidden states of the request's first tokens if its server has captured them, or the reason
        why not.
        """
        self.num_seen += 1
        self.num_new += 1
        label = self.labels.add(request.label)
        tokens = [*request.prompt, *request.answer]
        if isinstance(states, str):
            self.left_out[states] += 1
        elif max(tokens) >= self._vocab_size:
            self.left_out["other_vocabulary"] += 1
        elif self._image_token_id in tokens:  # the image is not known
            self.left_out["images"] += 1
        elif len(request.prompt) >= self._longest:
            self.left_out["long_prompt"] += 1
        else:
            num_tokens = min(self._longest, len(tokens) if states is None else len(states))
            ids = np.array(tokens[:num_tokens], dtype=np.int32)
            rows = states if states is None or len(states) == num_tokens else states[:num_tokens].clone()
            self._keep(request.prompt, KeptRequest(self.num_seen - 1, ids, len(request.prompt), label, rows))

    def states(self) -> dict[bytes, Tensor]:
        """Return the hidden states of each kept request for which a server captured them, by its tokens' bytes."""
        kept = (*self._train.values(), *self._held_out.values())
        return {one.input_ids.tobytes(): one.states for one in kept if one.states is not None}

    def draw(self, replayed: Sequence[Sample], done_steps: int) -> Dataset:
        """Return a cycle's training samples: kept requests, recent ones more likely, and some of ``replayed``.

        ``follow.replay`` is the share of samples from ``replayed``. The draw depends only on the added
        requests, the seed and ``done_steps``.
        """
        kept = list(self._train.values())
        num_live = min(len(kept), self._config.passes * self.num_fresh)
        ages = self.num_seen - np.array([one.number for one in kept])
        chosen = self._chosen(0.5 ** (ages / self._config.half_life), num_live, done_steps)
        live = [kept[index] for index in chosen]
        self.num_fresh = 0
        share = self._config.replay
        num_replayed = min(len(replayed), round(num_live * share / (1 - share)))
        again = self._chosen(np.ones(len(replayed)), num_replayed, done_steps, 1)
        masks = [replayed[index].loss_mask for index in again]
        return _dataset(
            [*(one.input_ids for one in live), *(replayed[index].input_ids for index in again)],
            [*(_answer_mask(one) for one in live), *masks],
        )

    def held_out(self) -> Dataset:
        """Return the held-out requests, oldest first, as the training samples (``train``) of a Dataset."""
        kept = list(self._held_out.values())
        return _dataset([one.input_ids for one in kept], [_answer_mask(one) for one in kept])

    def held_out_labels(self) -> list[str]:
        """Return the label of each held-out request, in the order of ``held_out``."""
        return [one.label for one in self._held_out.values()]

    def leave_out(self, dataset: Dataset, not_finite: Iterable[int]) -> None:
        """Drop the requests whose features are not finite.

        ``not_finite``: their sample ids in ``dataset``, which ``draw`` or ``held_out`` has returned.
        """
        for sample_id in not_finite:
            self.left_out["not_finite"] += 1
            ids = dataset.sample(sample_id).input_ids
            for group in (self._train, self._held_out):
                for digest in [key for key, one in group.items() if np.array_equal(one.input_ids, ids)]:
                    self._drop(group, digest)

    def _keep(self, prompt: Sequence[int], one: KeptRequest) -> None:
        digest, is_held_out = self._purpose(prompt)
        is_new = self._place(digest, is_held_out, one)
        if not is_held_out:
            if is_new:
                self.num_fresh += 1
            else:
                self.left_out["same_prompt"] += 1
        if not self._train:  # this request's features alone exceed the limit
            self.num_fresh = 0

    def _purpose(self, prompt: Sequence[int]) -> tuple[bytes, bool]:
        """Return a digest of the prompt, and whether a request with this prompt is held out."""
        digest = hashlib.blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
        return digest, int.from_bytes(digest[:8], "little") < self._config.held_out * 2**64

    def _place(self, digest: bytes, is_held_out: bool, one: KeptRequest) -> bool:
        """Keep a request, and return whether no other request with its prompt was kept.

        If there are now too many requests, the oldest is dropped. ``digest``: digest of the prompt.
        """
        group, most = (
            (self._held_out, self._config.window) if is_held_out else (self._train, self._config.kept)
        )
        is_new = digest not in group
        if not is_new:
            self._drop(group, digest)
        group[digest] = one
        self._num_state_bytes += one.num_state_bytes
        if len(group) > most:
            self._drop(group, next(iter(group)))
        while self._num_state_bytes > self._config.states_bytes:
            self._drop_oldest()
        return is_new

    def _drop_oldest(self) -> None:
        """Drop the oldest of all kept requests, because their features take too many bytes."""
        groups = [group for group in (self._train, self._held_out) if group]
        oldest = min(groups, key=lambda group: next(iter(group.values())).number)
        self._drop(oldest, next(iter(oldest)))
        self.left_out["states_bytes"] += 1

    def _drop(self, group: dict[bytes, KeptRequest], digest: bytes) -> None:
        self._num_state_bytes -= group.pop(digest).num_state_bytes

    def _chosen(self, weights: np.ndarray, num: int, *stream: int) -> list[int]:
        """Draw ``num`` different indices by their weights (Efraimidis and Spirakis, 2006); return them sorted.

        The run's seed and the numbers ``stream`` determine the draw.
        """
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, *stream]))
        uniform = (bits.random_raw(len(weights)) >> 11).astype(np.float64) * 2.0**-53
        keys = np.log(np.maximum(uniform, 2.0**-54)) / np.maximum(weights, 1e-300)
        return sorted(np.argsort(-keys, kind="stable")[:num].tolist())


def _answer_mask(one: KeptRequest) -> np.ndarray:
    return np.arange(len(one.input_ids)) >= one.num_prompt


def _dataset(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Dataset:
    samples = tuple(
        Sample(number, input_ids, mask, f"live sample {number}")
        for number, (input_ids, mask) in enumerate(zip(ids, masks, strict=True))
    )
    return Dataset(samples, (), DataReport())
