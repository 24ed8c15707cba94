"""Reference decoding, one sequence at a time: draft, verify in one forward pass of the target, accept, repeat.

A *round* is one verification of a proposal, also of an empty one; the prefill, which yields the first token, is none.
A round counts in full also where it passes ``max_new_tokens`` or an end-of-sequence token: only the emitted text is
cut there. Decoding without a draft counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core import Proposal
from spec_core.drafting import TargetOps, recognise
from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters, Generation
from spec_core.targets import read_target_tensors
from spec_engine_hf.sampling import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    from torch import Tensor, nn

    from spec_core import Proposer
    from spec_core.records import SamplingParams
    from spec_engine_hf.hf_model import HfModel

_NO_GUESS = Proposal(token_ids=())


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A source of proposers, one per sequence, and the target layers whose states they need."""

    new_proposer: Callable[[], Proposer]
    layers: tuple[int, ...] = ()
    module: nn.Module | None = None
    """The network behind the proposers, where they are those of an exported draft."""
    ops: TargetOps | None = None
    """The target's frozen tensors, as that network uses them."""

    @classmethod
    def of_export(cls, folder: Path, model: HfModel, ops: TargetOps | None = None) -> Self:
        """Return proposers of the exported draft in ``folder``, on the device and in the dtype of ``model``.

        ``ops`` are those of another draft of the same model, if there is one: no further memory is taken for them.
        Raise ArtifactError where no installed draft recognises the folder or it is damaged, TargetError where the
        draft does not fit the target.
        """
        target = model.target
        draft = recognise(folder, target)
        tensors = read_target_tensors(target)
        # A build draws initial weights before it reads the folder's; a run's own random state must not notice.
        with torch.random.fork_rng(devices=[]):
            module = draft.build(target, tensors, None)
        module = module.to(model.device, model.dtype).eval().requires_grad_(False)
        ops = ops or TargetOps(target, tensors, model.device, model.dtype)
        layers = draft.required_features(target).layers
        return cls(new_proposer=lambda: draft.proposer(module, ops), layers=layers, module=module, ops=ops)


class Decoder:
    """Decode with ``drafting``, or plainly, and count acceptance over the object's lifetime."""

    def __init__(self, model: HfModel, drafting: DraftSource | None = None) -> None:
        """Decode by ``model``, with proposals of ``drafting`` if there is one."""
        self._model = model
        self.drafting = drafting
        self._counted = AcceptanceCounters()

    def acceptance(self) -> AcceptanceCounters:
        """Return what was counted so far."""
        return self._counted

    def generate(self, prompt: Sequence[int], sampling: SamplingParams, index: int) -> Generation:
        """Return one answer, which depends on ``sampling.seed`` and the prompt's index among others alone.

        The last known token is always the one that the target has not run yet.
        """
        generator = torch.Generator(self._model.device).manual_seed(sampling.prompt_seed(index))
        drafting = self._drafting_for(sampling)
        self._check_prompt(prompt, sampling)
        session = self._model.session(drafting.layers if drafting else ())
        proposer = drafting.new_proposer() if drafting else None
        answer = _Answer(sampling, frozenset(self._model.target.eos_token_ids), drafted=proposer is not None)

        logits_RV, hidden_TNH = session.forward(prompt, last_only=True)
        verdict = verify(logits_RV, _NO_GUESS, sampling.temperature, generator, sampling.top_p)
        next_ids = [*prompt[1:], verdict.next_token]
        answer.take(next_ids[-1:], logits_RV)
        while not answer.complete:
            proposal = _NO_GUESS
            if proposer is not None:
                proposer.extend(next_ids, hidden_TNH)
                proposal = proposer.propose(sampling.num_draft_tokens, sampling.temperature, generator)
            logits_RV, hidden_TNH = session.forward([next_ids[-1], *proposal.token_ids])
            verdict = verify(logits_RV, proposal, sampling.temperature, generator, sampling.top_p)
            session.rewind(len(proposal.token_ids) - verdict.accepted)
            next_ids = [*proposal.token_ids[: verdict.accepted], verdict.next_token]
            hidden_TNH = hidden_TNH[: len(next_ids)]
            answer.take(next_ids, logits_RV, len(proposal.token_ids))
            if proposer is not None:
                answer.verifications[verdict.accepted] += 1
                self._counted += AcceptanceCounters.of_rounds(len(proposal.token_ids), verdict.accepted)
        return answer.generation()

    def _drafting_for(self, sampling: SamplingParams) -> DraftSource | None:
        if sampling.num_draft_tokens == 0:
            return None
        if self.drafting is None:
            raise EngineError(f"{sampling.num_draft_tokens} draft tokens are wanted, but no draft is loaded")
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


class _Answer:
    """The emitted text, cut at ``max_new_tokens`` and after the first end-of-sequence token (which stays)."""

    def __init__(self, sampling: SamplingParams, eos_token_ids: frozenset[int], drafted: bool) -> None:
        self._drafted = drafted
        self._room = sampling.max_new_tokens
        self._stops = eos_token_ids if sampling.stop_at_eos else frozenset[int]()
        self._token_ids: list[int] = []
        self._gaps: list[float] = []
        self._places: list[int] = []
        self.verifications = [0] * (sampling.num_draft_tokens + 1) if drafted else []
        """How many accepted 0, 1, … guesses."""

    @property
    def complete(self) -> bool:
        stopped = bool(self._token_ids) and self._token_ids[-1] in self._stops
        return stopped or len(self._token_ids) >= self._room

    def take(self, token_ids: Sequence[int], logits_RV: Tensor, num_guesses: int = 0) -> None:
        """Append the ``token_ids`` of a round, given the rows of logits that they follow from.

        Further rows are ignored. The first ``num_guesses`` tokens are what became of guesses.
        """
        top_R2 = logits_RV[: len(token_ids)].topk(2, dim=-1).values
        gaps: list[float] = (top_R2[:, 0] - top_R2[:, 1]).tolist()
        for place, (token_id, gap) in enumerate(zip(token_ids, gaps, strict=True), start=1):
            if not self.complete:
                self._token_ids.append(token_id)
                self._gaps.append(gap)
                self._places.append(place if place <= num_guesses else 0)

    def generation(self) -> Generation:
        return Generation(
            token_ids=tuple(self._token_ids),
            top2_margin=tuple(self._gaps),
            guess_places=tuple(self._places) if self._drafted else (),
            verifications=tuple(self.verifications),
        )
