"""A Workbench has a draft that is built on the toy target, and the operations of DraftSuite's tests.

Shapes: K proposed tokens, T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from spec_core import Draft, FindKernel, Proposal, Proposer, TargetSpec, TargetTensors
from spec_core.errors import TargetError
from spec_core.records import DraftBatch, FeatureSchema, StepOutput
from spec_kit.drafting import write_draft
from spec_kit.layers.target_ops import TargetOps
from spec_testing.toy_target import (
    ToySample,
    toy_batch,
    toy_features,
    toy_ops,
    toy_samples,
    toy_tensors,
    toy_tokens,
)

LENGTHS = (11, 1, 7, 19, 5, 2, 13)
NUM_PROPOSALS = 3
INEXPRESSIBLE: dict[str, dict[str, object]] = {
    "one layer": {"num_layers": 1},
    "head bias": {"head_bias_name": "lm_head.bias"},
    "layer norm": {"norm": "layer"},
}
"""Property -> changes of the toy target that give it the property; most drafts cannot express such
targets."""


@dataclass(frozen=True)
class Workbench:
    """A draft with its module, built on the toy target."""

    draft: Draft
    target: TargetSpec
    tensors: TargetTensors
    schema: FeatureSchema
    module: nn.Module
    ops: TargetOps

    def samples(self, lengths: Sequence[int] = LENGTHS) -> list[ToySample]:
        """Return documents of these lengths, with features of the draft's schema."""
        return toy_samples(self.schema, self.target, self.tensors, lengths)

    def denominators(self, samples: Sequence[ToySample]) -> Tensor:
        """Return the denominators of a global batch of these samples."""
        return self.draft.denominators([sample.supervision for sample in samples])

    def forward_backward(self, batches: Sequence[DraftBatch], denominators: Tensor) -> StepOutput:
        """Run forward and backward on the batches from zero gradients; return the summed output."""
        self.module.zero_grad()
        outputs: list[StepOutput] = []
        for batch in batches:
            output: StepOutput = self.module(batch, denominators, self.ops)
            output.loss.backward()
            outputs.append(output.detached())
        return sum(outputs[1:], start=outputs[0])

    def gradients(self) -> dict[str, Tensor]:
        """Return parameter name -> gradient; fail if a parameter has no gradient."""
        found = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        missing = [name for name, grad in found.items() if grad is None]
        assert not missing, f"no gradient reached {', '.join(missing)}"
        return {name: grad for name, grad in found.items() if grad is not None}

    def with_kernels(self, kernel: FindKernel) -> Workbench:
        """Return a workbench with the same weights in a module that uses a backend's kernels."""
        module = self.draft.build(self.target, self.tensors, None, kernel)
        module.load_state_dict(self.module.state_dict())
        return replace(self, module=module)

    def use_large_weights(self) -> Workbench:
        """Make the weights as large as trained weights, and return this workbench.

        The guesses of a fresh draft hardly depend on the context, so a wrong position or a missing key would
        change no arg-max.
        """
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in self.module.parameters():
                scale = 2 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        return self

    def contexts(self) -> list[ToySample]:
        """Return documents of nine known tokens each; the last token has no hidden state yet."""
        return self.samples([9] * 4)

    def propose(self, context: ToySample) -> Proposal:
        """Return a fresh proposer's greedy guesses after a context."""
        proposer = self.draft.proposer(self.module, self.ops)
        extend(proposer, context, 0, len(context.input_ids) - 1)
        return ask(proposer)

    def judge(self, context: ToySample, continuation: Sequence[int], supervised: Sequence[int]) -> StepOutput:
        """Return the module's output on a context and a continuation that the target is made to predict.

        ``supervised``: indices of the supervised tokens, counted from the start of the context.
        """
        generator = torch.Generator().manual_seed(4)
        known = len(context.input_ids) - 1
        # A little more than needed: no label may be missing because the document ends.
        tokens = torch.cat([context.input_ids, torch.tensor(list(continuation)), toy_tokens(3, generator)])
        hidden_TNH = toy_features(tokens[1:], self.schema, self.target, self.tensors, generator)
        hidden_TNH[:known] = context.hidden_TNH[:known]
        mask = torch.zeros(len(tokens) - 1, dtype=torch.bool)
        mask[list(supervised)] = True
        sample = ToySample(0, tokens[:-1], hidden_TNH, mask)
        with torch.no_grad():
            return self.module(toy_batch([sample], self.schema), self.denominators([sample]), self.ops)

    def counts_of_rounds(self) -> tuple[list[int], list[int]]:
        """Return how many tokens count at each draft position, for a plain document and for a served answer.

        The served answer has a round with two verified guesses and a round with one (``guess_depth``).
        """
        (sample,) = self.samples([19])
        sample = replace(sample, loss_mask=torch.ones(19, dtype=torch.bool))
        guess_depth_T = torch.zeros(19, dtype=torch.int64)
        guess_depth_T[6], guess_depth_T[7], guess_depth_T[9] = 1, 2, 1
        plain, judged = (
            self.forward_backward([toy_batch([one], self.schema)], self.denominators([one]))
            for one in (sample, replace(sample, guess_depth=guess_depth_T))
        )
        return plain.counts["accuracy"].tolist(), judged.counts["accuracy"].tolist()

    def export(self, folder: Path) -> Draft:
        """Export the draft to ``folder``, and return the draft that ``from_folder`` returns for it."""
        folder.mkdir()
        write_draft(self.draft, self.module.state_dict(), self.target, folder)
        draft = type(self.draft).from_folder(folder)
        assert isinstance(draft, type(self.draft)), "from_folder does not recognise the draft's own export"
        assert draft.config.init_from == folder
        return draft


def build(
    draft: Draft, target: TargetSpec, seed: int = 0, others: Mapping[str, Tensor] | None = None
) -> Workbench:
    """Return the draft built on the toy target.

    ``others``: further tensors of the target; the draft gets only the tensors that it names (D11).
    """
    named = draft.target_tensors(target)
    tensors = replace(toy_tensors(target), others={name: (others or {})[name] for name in named})
    schema = draft.required_features(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = draft.build(target, tensors, token_counts=None)
    return Workbench(draft, target, tensors, schema, module, toy_ops(target, tensors))


def extend(proposer: Proposer, sample: ToySample, start: int, stop: int) -> None:
    """Pass the hidden states of tokens ``start`` to ``stop`` of a sample to ``Proposer.extend``."""
    proposer.extend(sample.input_ids[start + 1 : stop + 1].tolist(), sample.hidden_TNH[start:stop])


def ask(proposer: Proposer, temperature: float = 0.0) -> Proposal:
    """Return a proposer's guesses, drawn from a fixed seed."""
    return proposer.propose(NUM_PROPOSALS, temperature, torch.Generator().manual_seed(3))


def extend_together(
    proposers: Sequence[Proposer], samples: Sequence[ToySample], starts: Sequence[int], stops: Sequence[int]
) -> None:
    """Pass states of each sample, from its start to its stop, to its proposer by ``extend_all``."""
    parts = list(zip(samples, starts, stops, strict=True))
    next_ids = [sample.input_ids[start + 1 : stop + 1].tolist() for sample, start, stop in parts]
    hidden = [sample.hidden_TNH[start:stop] for sample, start, stop in parts]
    type(proposers[0]).extend_all(proposers, next_ids, hidden)


def ask_together(proposers: Sequence[Proposer], temperature: float) -> list[Proposal]:
    """Return several proposers' guesses, each drawn with the same seed as in ``ask``."""
    generators = [torch.Generator().manual_seed(3) for _ in proposers]
    return type(proposers[0]).propose_all(proposers, NUM_PROPOSALS, temperature, generators)


def acceptance_length_of(output: StepOutput) -> float:
    """Return the metric ``acceptance_length`` of the output, one number."""
    value = output.metrics()["acceptance_length"]
    assert isinstance(value, float)
    return value


def assert_equal_states(got: nn.Module, expected: nn.Module) -> None:
    """Assert that two modules have the same weights and buffers, bit for bit."""
    states, own = expected.state_dict(), got.state_dict()
    assert own.keys() == states.keys()
    different = [name for name, value in states.items() if not torch.equal(own[name], value)]
    assert not different, f"{', '.join(different)} differ"


def assert_same_gradients(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Assert that gradients agree within ``tolerance`` times the largest gradient."""
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=tolerance, atol=tolerance * scale)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of all floating-point tensors in an exported folder."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a mapping)
    (dtype,) = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtype


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value rounded to ``dtype``, in the value's dtype."""
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Return file name -> content for each file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def damage_folder(folder: Path, damage: str) -> None:
    """Damage an exported folder in one of the ways that a draft must notice."""
    tensors, config = folder / "model.safetensors", folder / "config.json"
    if damage == "no tensors":
        tensors.unlink()
    elif damage == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:-8])
    else:
        fields = json.loads(config.read_text())
        del fields["hidden_size"]
        config.write_text(json.dumps(fields))


def assert_same_output(got: StepOutput, expected: StepOutput, tolerance: float) -> None:
    """Assert that loss and sums agree within ``tolerance``, and that counts are equal."""
    torch.testing.assert_close(got.loss.to(expected.loss.dtype), expected.loss, rtol=tolerance, atol=0)
    for name, total in expected.sums.items():
        sums = got.sums[name].to(total.dtype)
        torch.testing.assert_close(sums, total, rtol=tolerance, atol=tolerance)
        assert got.counts[name].tolist() == expected.counts[name].tolist()


def assert_refusal(draft: Draft, target: TargetSpec, what: str, expressed: bool) -> None:
    """Assert that ``check_target`` refuses ``target`` or, if ``expressed``, that it accepts ``target``.

    ``what``: name of the target's special property, for messages. ``expressed``: whether the test class claims that
    the draft supports this property (``DraftSuite.expresses``).
    """
    method = f"{type(draft).__name__}.check_target"
    refusal = None
    try:
        draft.check_target(target)
    except TargetError as error:
        refusal = str(error)
    if expressed:
        assert refusal is None, f"{method} refuses a target with {what}, which 'expresses' names: {refusal}"
        return
    assert refusal is not None, (
        f"{method} accepts a target with {what}; expected a TargetError. If the draft's loss and proposals take it "
        f"into account, add {what!r} to 'expresses' of the test class"
    )
    assert len(refusal.splitlines()) == 1, f"{method} refuses in more than one line: {refusal}"
