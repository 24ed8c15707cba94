"""Decode several sequences at a time, as a reference: draft, verify in one pass, accept, repeat.

A *round* is one verification of a proposal, even of an empty proposal. The prefill, which yields the first
token, is no round. A round is counted in full even if it exceeds ``max_new_tokens`` or passes an
end-of-sequence token, although the answer is cut off there. Decoding without a draft counts no rounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core import Proposal
from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters, Generation, images_of
from spec_kit.drafting import (
    build_module,
    distribution,
    recognise,
    uniform_numbers,
    verify_greedy,
    verify_sampled,
)
from spec_kit.layers import TargetOps
from spec_kit.targets import read_target_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    from torch import Generator, Tensor, nn

    from spec_core import Proposer
    from spec_core.records import GenerationRequest, SamplingParams
    from spec_engine_hf.hf_model import HfModel
    from spec_engine_hf.session import Session
    from spec_kit.drafting import Verdict

    Answered = tuple[GenerationRequest, Generation]

_NO_GUESS = Proposal(token_ids=())

_NEAR_TIE = 1e-4
"""Threshold of a near tie: the gap between the two largest logits, divided by the largest magnitude of a
logit. Below this threshold, float32 rounding may decide the arg-max. It is about ten times the difference
seen between forward passes of different shapes."""


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """Creates a proposer for each sequence. ``layers``: target layers whose states the proposers need."""

    new_proposer: Callable[[], Proposer]
    layers: tuple[int, ...] = ()
    module: nn.Module | None = None
    """The network of the proposers, if they come from an exported draft."""
    ops: TargetOps | None = None
    """The target's frozen tensors, in the form in which ``module`` uses them."""

    @classmethod
    def of_export(cls, folder: Path, model: HfModel, ops: TargetOps | None = None) -> Self:
        """Return a source of proposers for the exported draft in ``folder``.

        The draft is on the device and in the dtype of ``model``. ``ops``: the frozen tensors that another
        draft of this model uses, which the new draft then shares; None loads them. Raise ArtifactError if no
        installed draft recognises the folder or if the folder is damaged. Raise TargetError if the draft does
        not fit the target.
        """
        target = model.target
        draft = recognise(folder, target)
        tensors = read_target_tensors(target)
        # Building a draft draws initial weights, which must not change the run's own random state.
        with torch.random.fork_rng(devices=[]):
            module = build_module(draft, target, tensors)
        module = module.to(model.device, model.dtype).eval().requires_grad_(False)
        ops = ops or TargetOps(target, tensors, model.device, model.dtype)
        layers = draft.required_features(target).layers
        return cls(new_proposer=lambda: draft.proposer(module, ops), layers=layers, module=module, ops=ops)


class Decoder:
    """Decodes with the draft of ``drafting``, or without a draft, and counts all accepted guesses."""

    def __init__(self, model: HfModel, drafting: DraftSource | None = None) -> None:
        """Decode with ``model``; ``drafting`` makes the proposals. None means no draft."""
        self._model = model
        self.drafting = drafting
        self._rounds = Counter[tuple[int, int]]()
        """(number of guesses, number of accepted guesses) → number of rounds with these numbers."""

    def acceptance(self) -> AcceptanceCounters:
        """Return the counts of rounds and accepted guesses so far."""
        counted = (AcceptanceCounters.of_rounds(*key, rounds) for key, rounds in self._rounds.items())
        return sum(counted, AcceptanceCounters())

    def begin(self, sampling: SamplingParams) -> Batch:
        """Return a batch without sequences. Raise EngineError if its draft tokens cannot be had."""
        drafting = self._drafting_for(sampling)
        return Batch(self, sampling, drafting, self._model.session(drafting.layers if drafting else ()))

    def step(self, batch: Batch, requests: Sequence[GenerationRequest]) -> list[Answered]:
        """Begin to answer ``requests``, then decode a round of every sequence; return what has ended.

        An answer depends on its request, but not on the sequences that are decoded at the same time.
        """
        for request in requests:
            self._check_prompt(request.prompt, batch.sampling)
        new = [self._sequence(request, batch) for request in requests]
        if new:
            self._verify(new, batch.prefill(new), batch.sampling)
        ended = [sequence for sequence in new if sequence.complete]
        batch.settle()
        if batch.live:
            if batch.drafting is not None:
                self._propose(batch.live, batch.states, batch.sampling)
            self._verify(batch.live, batch.forward(), batch.sampling)
            if batch.drafting is not None:
                self._count(batch.live)
        ended += [sequence for sequence in batch.live if sequence.complete]
        return [(sequence.request, sequence.generation()) for sequence in ended]

    def _sequence(self, request: GenerationRequest, batch: Batch) -> _Sequence:
        stops = self._model.target.eos_token_ids if batch.sampling.stop_at_eos else ()
        return _Sequence(
            request,
            room=batch.sampling.max_new_tokens,
            stops=frozenset(stops),
            generator=_generator(self._model.device, request.seed),
            num_guesses=batch.sampling.num_draft_tokens,
            proposer=batch.drafting.new_proposer() if batch.drafting else None,
        )

    def _propose(self, live: Sequence[_Sequence], states: Sequence[Tensor], sampling: SamplingParams) -> None:
        """Give each sequence's proposer the states that it has not seen yet, and let it propose guesses."""
        proposers = [sequence.proposer for sequence in live if sequence.proposer is not None]
        unseen = [sequence.unseen_ids() for sequence in live]
        kind = type(proposers[0])
        kind.extend_all(
            proposers, unseen, [hidden[: len(ids)] for hidden, ids in zip(states, unseen, strict=True)]
        )
        proposals = kind.propose_all(
            proposers, sampling.num_draft_tokens, sampling.temperature, [s.generator for s in live]
        )
        for sequence, proposal in zip(live, proposals, strict=True):
            sequence.proposal = proposal

    def _verify(self, live: Sequence[_Sequence], logits_BRV: Tensor, sampling: SamplingParams) -> None:
        """Verify each sequence's guesses against the target's logits; append the resulting tokens."""
        top_BR2 = logits_BRV.topk(2, dim=-1).values
        gap_BR = top_BR2[..., 0] - top_BR2[..., 1]
        proposals = [sequence.proposal for sequence in live]
        if sampling.temperature > 0:
            uniform_BR = uniform_numbers([s.generator for s in live], sampling.num_draft_tokens + 1)
            probs_BRV = distribution(logits_BRV, sampling.temperature, sampling.top_p)
            verdicts = verify_sampled(probs_BRV, proposals, uniform_BR)
        else:
            best: list[list[int]] = logits_BRV.argmax(dim=-1).tolist()
            close: list[list[bool]] = self._near_ties(logits_BRV, gap_BR).tolist()
            verdicts = [
                verify_greedy(self._choices(*choice), choice[0].proposal)
                for choice in zip(live, best, close, strict=True)
            ]
        gaps: list[list[float]] = gap_BR.tolist()
        for sequence, verdict, own in zip(live, verdicts, gaps, strict=True):
            sequence.take(verdict, own)

    def _near_ties(self, logits_BRV: Tensor, gap_BR: Tensor) -> Tensor:
        """Return bool [B, R]: whether rounding may have decided the arg-max of each row of logits.

        ``gap_BR``: the gap between each row's two largest logits. The result is False everywhere if the
        target is not in float32.
        """
        if self._model.dtype != torch.float32:
            return torch.zeros_like(gap_BR, dtype=torch.bool)
        return gap_BR < _NEAR_TIE * logits_BRV.abs().amax(dim=-1)

    def _choices(self, sequence: _Sequence, best: list[int], close: Sequence[bool]) -> list[int]:
        """Return the token that greedy decoding chooses at each row of logits.

        ``best``: each row's arg-max. ``close``: whether the row is a near tie. Near ties up to the first
        rejected guess are recomputed by a forward pass without a KV cache.
        """
        guesses = sequence.proposal.token_ids
        for position in range(len(guesses) + 1 if any(close) else 0):
            if close[position]:
                logits_V = self._model.next_logits([*sequence.text, *guesses[:position]], sequence.images)
                best[position] = int(logits_V.argmax())
            if position < len(guesses) and best[position] != guesses[position]:
                break
        return best

    def _count(self, live: Sequence[_Sequence]) -> None:
        for sequence in live:
            guessed = len(sequence.proposal.token_ids)
            accepted = len(sequence.new_ids) - 1
            sequence.verifications[accepted] += 1
            self._rounds[guessed, accepted] += 1

    def _drafting_for(self, sampling: SamplingParams) -> DraftSource | None:
        if sampling.num_draft_tokens == 0:
            return None
        if self.drafting is None:
            raise EngineError("draft tokens are wanted, but no draft is loaded")
        if kinds := self._model.unrewindable_layers():
            raise EngineError(
                f"target {self._model.target.folder} has layers ({', '.join(kinds)}) that cannot drop rejected "
                f"tokens again; reference decoding with a draft needs attention layers only"
            )
        return self.drafting

    def _check_prompt(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        target = self._model.target
        longest = len(prompt) + sampling.max_new_tokens + sampling.num_draft_tokens
        if not prompt or longest > target.max_positions:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens with {sampling.max_new_tokens} new and "
                f"{sampling.num_draft_tokens} draft tokens does not fit target {target.folder} "
                f"(1 to {target.max_positions} positions)"
            )


class Batch:
    """Sequences that one session decodes together, and the target's states of their last appended tokens."""

    def __init__(
        self, decoder: Decoder, sampling: SamplingParams, drafting: DraftSource | None, session: Session
    ) -> None:
        """Begin without sequences; all of them are decoded with ``sampling`` and ``drafting``."""
        self.decoder = decoder
        self.sampling = sampling
        self.drafting = drafting
        self.live: list[_Sequence] = []
        self.states: list[Tensor] = []
        self._session = session

    @property
    def num_running(self) -> int:
        """Number of sequences that have not ended."""
        return sum(not sequence.complete for sequence in self.live)

    def prefill(self, sequences: Sequence[_Sequence]) -> Tensor:
        """Run further sequences' prompts through the target; return the logits after each prompt, [B, 1, V]."""
        if not self.num_running:
            self.settle()
        logits_B1V, states = self._session.prefill([sequence.request.prompt for sequence in sequences])
        self.live += sequences
        self.states += states
        return logits_B1V

    def settle(self) -> None:
        """Drop rejected guesses, and the sequences that have ended."""
        self._session.keep([0 if s.complete else len(s.new_ids) for s in self.live])
        self.states = [h for h, s in zip(self.states, self.live, strict=True) if not s.complete]
        self.live = [sequence for sequence in self.live if not sequence.complete]

    def forward(self) -> Tensor:
        """Run each sequence's last token and guesses through the target; return their logits [B, R, V]."""
        rows = [[sequence.text[-1], *sequence.proposal.token_ids] for sequence in self.live]
        logits_BRV, states_BTNH = self._session.forward(rows)
        self.states = list(states_BTNH)
        return logits_BRV


class _Sequence:
    """A prompt and its answer so far.

    The answer ends after ``room`` tokens, or after its first token of ``stops``, which stays in the answer.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        room: int,
        stops: frozenset[int],
        generator: Generator,
        num_guesses: int,
        proposer: Proposer | None,
    ) -> None:
        self.request = request
        self.images = images_of(request.prompt)
        self.text = list(request.prompt)
        """All known tokens. The target has not run the last token yet."""
        self.generator = generator
        self.proposer = proposer
        self.proposal = _NO_GUESS
        self.new_ids: list[int] = []
        """Tokens that the latest verification yielded."""
        self.verifications = [0] * (num_guesses + 1) if proposer is not None else []
        """Number of verifications that accepted 0, 1, … guesses."""
        self._room = room
        self._stops = stops
        self._num_seen = 1  # no state precedes the first token
        self._token_ids: list[int] = []
        self._gaps: list[float] = []
        self._guess_depths: list[int] = []
        self._refused: list[int] = []

    @property
    def complete(self) -> bool:
        stopped = bool(self._token_ids) and self._token_ids[-1] in self._stops
        return stopped or len(self._token_ids) >= self._room

    def unseen_ids(self) -> list[int]:
        """Return the token ids that the proposer has not been given yet."""
        start, self._num_seen = self._num_seen, len(self.text)
        return self.text[start:]

    def take(self, verdict: Verdict, gaps: Sequence[float]) -> None:
        """Append the accepted guesses and the token that follows them.

        ``gaps``: for each new token, the gap between the two largest logits of its row.
        """
        guesses = self.proposal.token_ids
        self.new_ids = [*guesses[: verdict.accepted], verdict.next_token]
        self.text += self.new_ids
        judged = [*[-1] * verdict.accepted, *guesses[verdict.accepted : verdict.accepted + 1], -1]
        for position, (token_id, gap) in enumerate(zip(self.new_ids, gaps, strict=False), start=1):
            if not self.complete:
                self._token_ids.append(token_id)
                self._gaps.append(gap)
                self._guess_depths.append(position if position <= len(guesses) else 0)
                self._refused.append(judged[position - 1])

    def generation(self) -> Generation:
        return Generation(
            token_ids=tuple(self._token_ids),
            top2_margin=tuple(self._gaps),
            guess_depths=tuple(self._guess_depths) if self.proposer is not None else (),
            refused_guesses=tuple(self._refused) if self.proposer is not None else (),
            verifications=tuple(self.verifications),
        )


def _generator(device: torch.device, seed: int | None) -> Generator:
    """Return a generator with this seed, or with a seed of the system's random numbers."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
