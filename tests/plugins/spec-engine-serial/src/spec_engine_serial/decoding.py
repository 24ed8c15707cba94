"""The target, a loaded draft, and an answer: draft, verify in one forward pass, accept, repeat.

Shapes: T tokens, N captured layers, H hidden size, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from transformers import AutoModelForCausalLM

from spec_core import Proposal
from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters, FeatureSample, Generation
from spec_kit.drafting import distribution, recognise, uniform_numbers, verify_greedy, verify_sampled
from spec_kit.layers import TargetOps, encode_features
from spec_kit.targets import read_target_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Generator, Tensor, nn

    from spec_core import Draft, ServingStatus, TargetSpec
    from spec_core.records import CaptureRequest, FeatureSchema, GenerationRequest, SamplingParams
    from spec_kit.drafting import Verdict


class Target:
    """The target, and the states that enter its layers."""

    def __init__(self, spec: TargetSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.model = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=spec.dtype).eval().to(device)
        decoder = self.model.get_decoder()
        self._entered = [*decoder.layers, decoder.norm]

    @torch.no_grad()
    def run(self, ids: Sequence[int], layers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return logits [T, V] and the states that enter ``layers``, [T, N, H]."""
        if (
            not 0 < len(ids) <= self.spec.max_positions
            or not 0 <= min(ids) <= max(ids) < self.spec.vocab_size
        ):
            raise EngineError(f"{len(ids)} tokens are not 1 to {self.spec.max_positions} ids of the target")
        kept: dict[int, Tensor] = {}
        hooks = [
            self._entered[layer].register_forward_pre_hook(_keeper(kept, layer), with_kwargs=True)
            for layer in layers
        ]
        logits_TV = self.model(torch.tensor([list(ids)], device=self.device), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        states = [kept[layer] for layer in layers]
        return logits_TV, torch.stack(states, dim=1) if states else logits_TV.new_empty(len(ids), 0, 0)

    def sample(self, request: CaptureRequest, schema: FeatureSchema) -> FeatureSample:
        """Return what a trainer gets for a request (E1, E2)."""
        _, states_TNH = self.run(request.input_ids, schema.layers)
        ids = torch.tensor(request.input_ids, device=self.device)
        hidden_TNH = encode_features(states_TNH.to(schema.torch_dtype()), schema).contiguous()
        return FeatureSample(request_id=request.request_id, input_ids=ids, hidden_TNH=hidden_TNH)


def _keeper(kept: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(_: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        kept[layer] = (args[0] if args else kwargs["hidden_states"])[0]

    return hook


class LoadedDraft:
    """An exported draft's network, and what was counted with it."""

    def __init__(self, draft: Draft, module: nn.Module, ops: TargetOps, layers: tuple[int, ...]) -> None:
        self.draft, self.module, self.ops, self.layers = draft, module, ops, layers
        self.counters = AcceptanceCounters()

    @classmethod
    def of_folder(cls, folder: Path, target: Target, ops: TargetOps | None = None) -> Self:
        """Raise ArtifactError where no installed draft knows the folder, or it is damaged."""
        draft, tensors = recognise(folder, target.spec), read_target_tensors(target.spec)
        dtype = target.model.dtype
        with torch.random.fork_rng(devices=[]):  # a build draws initial weights before it reads the folder's
            module = draft.build(target.spec, tensors, None).to(target.device, dtype).eval()
        ops = ops or TargetOps(target.spec, tensors, target.device, dtype)
        return cls(draft, module.requires_grad_(False), ops, draft.required_features(target.spec).layers)


@torch.no_grad()
def answer(
    target: Target,
    draft: LoadedDraft | None,
    request: GenerationRequest,
    sampling: SamplingParams,
    served: ServingStatus | None = None,
) -> Generation:
    """Return the answer to a request; ``served`` names the draft's version, if one was pushed."""
    prompt, text = request.prompt, list(request.prompt)
    stops = target.spec.eos_token_ids if sampling.stop_at_eos else ()
    end = len(prompt) + sampling.max_new_tokens
    generator = torch.Generator(target.device)
    generator.seed() if request.seed is None else generator.manual_seed(request.seed)
    proposer = None if draft is None else draft.draft.proposer(draft.module, draft.ops)
    proposal, states_TNH, seen = Proposal(token_ids=()), None, 1
    verifications = [0] * (sampling.num_draft_tokens + 1)
    while len(text) < end and not (len(text) > len(prompt) and text[-1] in stops):
        if proposer is not None and states_TNH is not None:
            proposer.extend(text[seen:], states_TNH[seen - 1 : len(text) - 1])
            seen = len(text)
            proposal = proposer.propose(sampling.num_draft_tokens, sampling.temperature, generator)
        logits_TV, states_TNH = target.run([*text, *proposal.token_ids], draft.layers if draft else ())
        verdict = verify(logits_TV[len(text) - 1 :], proposal, sampling, generator)
        if draft is not None and seen > 1:  # the prefill, which yields the first token, is no round
            verifications[verdict.accepted] += 1
            draft.counters += AcceptanceCounters.of_rounds(len(proposal.token_ids), verdict.accepted)
        new_ids = [*proposal.token_ids[: verdict.accepted], verdict.next_token]
        stop = next((place for place, token in enumerate(new_ids) if token in stops), len(new_ids))
        text += new_ids[: stop + 1]
    return Generation(
        token_ids=tuple(text[len(prompt) : end]),
        verifications=tuple(verifications) if draft is not None else (),
        draft_version=served.version if served else None,
        draft_digest=served.digest if served else "",
    )


def verify(logits_RV: Tensor, proposal: Proposal, sampling: SamplingParams, generator: Generator) -> Verdict:
    """E4: return what the target makes of the guesses; row k judges guess k, the last one follows them all."""
    if sampling.temperature == 0:
        return verify_greedy(logits_RV.argmax(dim=-1).tolist(), proposal)
    probs_RV = distribution(logits_RV, sampling.temperature, sampling.top_p)
    return verify_sampled(probs_RV[None], [proposal], uniform_numbers([generator], len(logits_RV)))[0]
