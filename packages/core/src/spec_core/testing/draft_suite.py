"""DraftSuite: the contract of spec_core.draft (D1–D9) as tests, on a small random target in memory.

::

    class TestMyDraft(DraftSuite):
        @pytest.fixture
        def draft(self) -> type[Draft]:
            return MyDraft

        @pytest.fixture
        def options(self) -> dict[str, object]:
            return {"num_steps": 3}

Losses are compared in float32: the shares of two cuts of one batch differ by rounding only.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from spec_core import plugins
from spec_core.config import DraftConfig
from spec_core.draft import Draft, Proposal, Proposer
from spec_core.errors import ArtifactError, TargetError
from spec_core.testing.conformance import ConformanceSuite, run_python, sources
from spec_core.testing.toy_target import (
    ToySample,
    toy_batch,
    toy_features,
    toy_ops,
    toy_samples,
    toy_target,
    toy_tensors,
    toy_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core.records import DraftBatch, FeatureSchema, StepOutput
    from spec_core.target import TargetSpec, TargetTensors
    from spec_core.target_ops import TargetOps

LENGTHS = (11, 1, 7, 19, 5, 2, 13)
WIDTH = max(LENGTHS)
TOLERANCE = 1e-5
"""Of the largest gradient: float32 rounding of sums in another order."""

FOREIGN: dict[str, dict[str, object]] = {
    "one layer": {"num_layers": 1},
    "soft-cap": {"logit_softcap": 30.0},
    "head bias": {"head_bias_name": "lm_head.bias"},
    "layer norm": {"norm": "layer"},
}


@dataclass(frozen=True)
class Setup:
    """A draft with its target, built."""

    draft: Draft
    target: TargetSpec
    tensors: TargetTensors
    schema: FeatureSchema
    module: nn.Module
    ops: TargetOps

    def samples(self, lengths: Sequence[int] = LENGTHS) -> list[ToySample]:
        return toy_samples(self.schema, self.target, self.tensors, lengths)

    def denominators(self, samples: Sequence[ToySample]) -> Tensor:
        return self.draft.denominators([sample.supervision for sample in samples])

    def forward_backward(self, batches: Sequence[DraftBatch], denominators: Tensor) -> StepOutput:
        """Output summed over the batches; gradients are left in the module, from zero."""
        self.module.zero_grad()
        outputs: list[StepOutput] = []
        for batch in batches:
            output: StepOutput = self.module(batch, denominators, self.ops)
            output.loss.backward()
            outputs.append(output.detached())
        return sum(outputs[1:], start=outputs[0])

    def gradients(self) -> dict[str, Tensor]:
        found = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        missing = [name for name, grad in found.items() if grad is None]
        assert not missing, f"no gradient reached {', '.join(missing)}"
        return {name: grad for name, grad in found.items() if grad is not None}


class DraftSuite(ConformanceSuite):
    """Needs the fixture ``draft``: the plugin's class."""

    expresses: ClassVar[frozenset[str]] = frozenset()
    """Keys of ``FOREIGN`` that this draft does express, so that it need not refuse such a target."""
    num_proposals: ClassVar[int] = 3

    @pytest.fixture
    def draft(self) -> type[Draft]:
        raise pytest.UsageError("a DraftSuite needs a fixture 'draft' that returns the plugin's class")

    @pytest.fixture
    def options(self) -> dict[str, object]:
        """Keys of section ``draft`` besides its name."""
        return {}

    @pytest.fixture
    def target(self, tmp_path: Path) -> TargetSpec:
        return toy_target(tmp_path / "target")

    @pytest.fixture
    def setup(self, draft: type[Draft], options: dict[str, object], target: TargetSpec) -> Setup:
        instance = draft(draft.Config.model_validate({"name": draft.name, **options}))
        return self._build(instance, target)

    def supervised(self, last_known: int, position: int) -> list[int]:
        """Token indices to supervise so that ``accuracy[position]`` counts exactly one row: the draft's guess
        number ``position`` after the token at index ``last_known``."""
        return [last_known + 1 + position]

    def test_d1_imports_without_torch(self, draft: type[Draft]) -> None:
        """D1: the class imports without torch, and Config derives from DraftConfig."""
        run_python(f"import importlib; importlib.import_module({draft.__module__!r})", blocked=["torch"])
        assert issubclass(draft.Config, DraftConfig)
        assert plugins.load(Draft, draft.name) is draft

    def test_d1_holds_no_optimizer_collective_or_device(self, draft: type[Draft]) -> None:
        """D1: no optimizer, no collective, no device string anywhere in the plugin."""
        found = [f"{file.name}:{where}" for file, tree in sources(draft) for where in _forbidden(tree)]
        assert not found, f"single-device code only, found {', '.join(found)}"

    @pytest.mark.parametrize("what", sorted(FOREIGN))
    def test_d2_refuses_what_it_cannot_express(self, setup: Setup, what: str, tmp_path: Path) -> None:
        """D2: a target that the draft cannot express is a TargetError of one line, never ignored."""
        if what in self.expresses:
            pytest.skip(f"draft {setup.draft.name!r} expresses a target with {what}")
        with pytest.raises(TargetError) as refusal:
            setup.draft.check_target(toy_target(tmp_path, **FOREIGN[what]))
        assert len(str(refusal.value).splitlines()) == 1

    def test_d2_features_of_an_accepted_target(self, setup: Setup) -> None:
        """D2: what is accepted has features: ascending layers of the target, in its width."""
        setup.draft.check_target(setup.target)
        schema = setup.draft.required_features(setup.target)
        assert schema == setup.schema
        assert schema.hidden_size == setup.target.hidden_size
        assert max(schema.layers) <= setup.target.num_layers

    def test_d3_parameters_are_what_is_trained(self, setup: Setup) -> None:
        """D3: float32 on the CPU, all of it trained; a module may be built anew from its state."""
        for name, parameter in setup.module.named_parameters():
            assert parameter.requires_grad, f"{name} is not trained: frozen tensors belong to ops"
            assert parameter.dtype == torch.float32
            assert parameter.device == torch.device("cpu")
        other = self._build(setup.draft, setup.target, seed=9).module
        other.load_state_dict(setup.module.state_dict())
        _assert_equal_states(other, setup.module)

    def test_d3_draws_weights_from_the_global_generator(self, setup: Setup) -> None:
        """D3: the same seed of torch's global generator gives the same weights."""
        _assert_equal_states(self._build(setup.draft, setup.target).module, setup.module)

    def test_d4_every_parameter_gets_a_gradient(self, setup: Setup) -> None:
        """D4: one forward pass touches every parameter."""
        samples = setup.samples()
        setup.forward_backward([toy_batch(samples, setup.schema)], setup.denominators(samples))
        dead = [name for name, grad in setup.gradients().items() if not grad.any()]
        assert not dead, f"the gradient of {', '.join(dead)} is zero everywhere"

    @pytest.mark.parametrize("spans", [0, 1, 2])
    def test_d4_empty_batch_touches_every_parameter(self, setup: Setup, spans: int) -> None:
        """D4, D5: a batch without supervised token, or without any document, adds 0 to a running global batch,
        and still gives every parameter its (zero) gradient."""
        samples = setup.samples()
        denominators = setup.denominators(samples)
        silent = [ToySample(s.sample_id, s.input_ids, s.hidden_TNH, s.loss_mask & False) for s in samples]
        output = setup.forward_backward([toy_batch(silent[:spans], setup.schema, width=4)], denominators)
        assert output.loss.item() == 0
        assert all(not grad.any() for grad in setup.gradients().values())

    def test_d5_zero_denominator_is_a_zero_step(self, setup: Setup) -> None:
        """D5: where nothing of the global batch is supervised, loss and gradients are 0, not NaN."""
        samples = [s for s in setup.samples() if not s.loss_mask.any()]
        denominators = setup.denominators(samples)
        assert not denominators.any()
        output = setup.forward_backward([toy_batch(samples, setup.schema)], denominators)
        assert output.loss.item() == 0
        assert all(not grad.any() for grad in setup.gradients().values())

    @pytest.mark.parametrize("width", [0, WIDTH], ids=["packed", "padded"])
    @pytest.mark.parametrize("size", [1, 2, 3, len(LENGTHS)])
    def test_d5_shares_add_up(self, setup: Setup, size: int, width: int) -> None:
        """D5: loss, gradients, sums and counts do not depend on how the global batch is cut."""
        samples = setup.samples()
        denominators = setup.denominators(samples)
        whole = setup.forward_backward([toy_batch(samples, setup.schema)], denominators)
        expected = setup.gradients()
        assert whole.loss.item() > 0
        assert whole.loss.isfinite()
        # From the other end, so that no cut is a prefix of the reference.
        cuts = [samples[::-1][i : i + size] for i in range(0, len(samples), size)]
        batches = [toy_batch(cut, setup.schema, width=width) for cut in cuts]
        got = setup.forward_backward(batches, denominators)
        _assert_same_output(got, whole)
        scale = max(float(grad.abs().max()) for grad in expected.values())
        for name, grad in setup.gradients().items():
            torch.testing.assert_close(grad, expected[name], rtol=TOLERANCE, atol=TOLERANCE * scale)

    def test_d6_denominators_add_up(self, setup: Setup) -> None:
        """D6: the global batch's denominators are the sum over its samples, in any order, without a model."""
        supervision = [sample.supervision for sample in setup.samples()]
        whole = setup.draft.denominators(supervision)
        assert whole.dtype == torch.float64
        assert whole.dim() == 1
        assert whole.device == torch.device("cpu")
        assert whole.any()
        singles = torch.stack([setup.draft.denominators([one]) for one in reversed(supervision)])
        torch.testing.assert_close(singles.sum(0), whole, rtol=1e-12, atol=0)
        assert not setup.draft.denominators([]).any()

    def test_d7_metrics_are_ratios_of_sums(self, setup: Setup) -> None:
        """D7: ``acceptance_length`` and, per draft position, ``accuracy`` are among the metrics, in range."""
        samples = setup.samples()
        output = setup.forward_backward([toy_batch(samples, setup.schema)], setup.denominators(samples))
        assert output.sums.keys() == output.counts.keys()
        assert all(output.sums[name].shape == count.shape for name, count in output.counts.items())
        metrics = output.metrics()
        accuracy, length = metrics["accuracy"], metrics["acceptance_length"]
        assert isinstance(accuracy, list)
        assert all(0 <= share <= 1 for share in accuracy)
        assert isinstance(length, float)
        assert 1 <= length <= 1 + len(accuracy)

    def test_d7_loss_falls(self, setup: Setup) -> None:
        """D7: trained on tokens of which each follows from the one before, the loss falls and more is accepted."""
        samples = setup.samples()
        batches, denominators = [toy_batch(samples, setup.schema)], setup.denominators(samples)
        optimizer = torch.optim.AdamW(setup.module.parameters(), lr=3e-3)
        outputs: list[StepOutput] = []
        for _ in range(30):
            outputs.append(setup.forward_backward(batches, denominators))
            optimizer.step()
        assert outputs[-1].loss < 0.5 * outputs[0].loss
        assert _acceptance_length(outputs[-1]) > _acceptance_length(outputs[0]) + 0.5

    def test_d8_export_comes_back(self, setup: Setup, tmp_path: Path) -> None:
        """D8: exported, recognised, built again: the same weights in the stored dtype, the same proposals; and
        exported again, the same bytes."""
        again = self._build(self._reload(setup, tmp_path / "first"), setup.target, seed=9)
        stored = _stored_dtype(tmp_path / "first")
        rounded = {name: _round(value, stored) for name, value in setup.module.state_dict().items()}
        setup.module.load_state_dict(rounded)
        _assert_equal_states(again.module, setup.module)
        assert self._propose(again).token_ids == self._propose(setup).token_ids
        self._reload(again, tmp_path / "second")
        assert _file_bytes(tmp_path / "first") == _file_bytes(tmp_path / "second")

    def test_d8_export_is_two_files(self, setup: Setup, tmp_path: Path) -> None:
        """D8: a served draft is config.json and model.safetensors, nothing else."""
        self._reload(setup, tmp_path / "out")
        assert sorted(_file_bytes(tmp_path / "out")) == ["config.json", "model.safetensors"]

    def test_d8_other_folders_are_not_its_own(self, setup: Setup, tmp_path: Path) -> None:
        """D8: another algorithm's folder gives None."""
        (tmp_path / "config.json").write_text(
            '{"architectures": ["SomeoneElsesModel"], "model_type": "else"}'
        )
        assert type(setup.draft).from_folder(tmp_path) is None

    @pytest.mark.parametrize("damage", ["no tensors", "cut tensors", "a field less"])
    def test_d8_damaged_folder_is_an_artifact_error(self, setup: Setup, damage: str, tmp_path: Path) -> None:
        """D8: this algorithm's folder, but damaged, is refused when it is read, in one line."""
        folder = tmp_path / "out"
        self._reload(setup, folder)
        _damage(folder, damage)
        with pytest.raises(ArtifactError) as refusal:
            type(setup.draft).from_folder(folder)
        assert len(str(refusal.value).splitlines()) == 1

    def test_d9_proposals_are_the_modules_own(self, setup: Setup) -> None:
        """D9: where the target agrees with proposal k, the module's forward pass counts draft position k as
        accepted; where it says another token, as refused."""
        context = setup.samples([9])[0]
        proposals = self._propose(setup, context).token_ids
        assert len(proposals) == self.num_proposals
        for position, token in enumerate(proposals):
            for said, accepted in ((token, 1.0), ((token + 1) % setup.target.vocab_size, 0.0)):
                tokens = [*proposals[:position], said]
                output = self._judge(setup, context, tokens, position)
                assert output.counts["accuracy"][position].item() == 1
                assert output.sums["accuracy"][position].item() == accepted

    def test_d9_extending_in_parts_changes_nothing(self, setup: Setup) -> None:
        """D9: states arrive in any portions, and a proposal leaves no trace."""
        context = setup.samples([9])[0]
        whole = self._propose(setup, context)
        proposer = setup.draft.proposer(setup.module, setup.ops)
        for start, stop in ((0, 1), (1, 5), (5, 8)):
            _extend(proposer, context, start, stop)
            self._ask(proposer)
        assert self._ask(proposer).token_ids == self._ask(proposer).token_ids == whole.token_ids

    def test_d9_sampled_proposals_come_with_their_law(self, setup: Setup) -> None:
        """D9: at a temperature the law of each guess comes along: float32 [K, V], rows sum to 1, and the guess
        is possible under it; the generator alone decides."""
        context = setup.samples([9])[0]
        proposer = setup.draft.proposer(setup.module, setup.ops)
        _extend(proposer, context, 0, 8)
        first, second = self._ask(proposer, temperature=1.0), self._ask(proposer, temperature=1.0)
        assert first.token_ids == second.token_ids
        if first.probs_KV is None:
            assert first.token_ids == self._ask(proposer).token_ids
            return
        assert first.probs_KV.dtype == torch.float32
        assert first.probs_KV.shape == (self.num_proposals, setup.target.vocab_size)
        torch.testing.assert_close(first.probs_KV.sum(-1), torch.ones(self.num_proposals))
        assert all(law_V[token] > 0 for law_V, token in zip(first.probs_KV, first.token_ids, strict=True))

    def _build(self, draft: Draft, target: TargetSpec, seed: int = 0) -> Setup:
        tensors = toy_tensors(target)
        schema = draft.required_features(target)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = draft.build(target, tensors, token_counts=None)
        return Setup(draft, target, tensors, schema, module, toy_ops(target, tensors))

    def _reload(self, setup: Setup, folder: Path) -> Draft:
        folder.mkdir()
        setup.draft.export(setup.module.state_dict(), setup.target, folder)
        draft = type(setup.draft).from_folder(folder)
        assert isinstance(draft, type(setup.draft))
        assert draft.config.init_from == folder
        return draft

    def _propose(self, setup: Setup, context: ToySample | None = None) -> Proposal:
        """After all tokens of the context, of which the last has no state yet."""
        sample = context or setup.samples([9])[0]
        proposer = setup.draft.proposer(setup.module, setup.ops)
        _extend(proposer, sample, 0, len(sample.input_ids) - 1)
        return self._ask(proposer)

    def _ask(self, proposer: Proposer, temperature: float = 0.0) -> Proposal:
        return proposer.propose(self.num_proposals, temperature, torch.Generator().manual_seed(3))

    def _judge(self, setup: Setup, context: ToySample, said: Sequence[int], position: int) -> StepOutput:
        """The module's own pass over context and continuation, with a target that says the continuation."""
        generator = torch.Generator().manual_seed(4)
        known = len(context.input_ids)
        # Two tokens more than needed: no label may be missing because the document ends.
        tokens = torch.cat([context.input_ids, torch.tensor(list(said)), toy_tokens(3, generator)])
        hidden_TNH = toy_features(tokens[1:], setup.schema, setup.target, setup.tensors, generator)
        hidden_TNH[: known - 1] = context.hidden_TNH[: known - 1]
        mask = torch.zeros(len(tokens) - 1, dtype=torch.bool)
        mask[self.supervised(known - 1, position)] = True
        sample = ToySample(0, tokens[:-1], hidden_TNH, mask)
        with torch.no_grad():
            return setup.module(toy_batch([sample], setup.schema), setup.denominators([sample]), setup.ops)


def _extend(proposer: Proposer, sample: ToySample, start: int, stop: int) -> None:
    proposer.extend(sample.input_ids[start + 1 : stop + 1].tolist(), sample.hidden_TNH[start:stop])


def _acceptance_length(output: StepOutput) -> float:
    value = output.metrics()["acceptance_length"]
    assert isinstance(value, float)
    return value


def _assert_same_output(got: StepOutput, expected: StepOutput) -> None:
    torch.testing.assert_close(got.loss, expected.loss, rtol=TOLERANCE, atol=0)
    for name, total in expected.sums.items():
        torch.testing.assert_close(got.sums[name], total, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(got.counts[name], expected.counts[name])


def _assert_equal_states(got: nn.Module, expected: nn.Module) -> None:
    states, own = expected.state_dict(), got.state_dict()
    assert own.keys() == states.keys()
    different = [name for name, value in states.items() if not torch.equal(own[name], value)]
    assert not different, f"{', '.join(different)} differ"


def _stored_dtype(folder: Path) -> torch.dtype:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a mapping)
    (dtype,) = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtype


def _round(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value


def _file_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _damage(folder: Path, damage: str) -> None:
    tensors, config = folder / "model.safetensors", folder / "config.json"
    if damage == "no tensors":
        tensors.unlink()
    elif damage == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:-8])
    else:
        fields = json.loads(config.read_text())
        del fields["hidden_size"]
        config.write_text(json.dumps(fields))


def _forbidden(tree: ast.Module) -> list[str]:
    """Where the source names an optimizer, a collective or a device."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.optim", "torch.distributed"}:
            found.append(f"{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("torch.optim", "torch.distributed")
        ):
            found.append(f"{node.lineno} {node.module}")
        elif isinstance(node, ast.Constant) and str(node.value).split(":")[0] in {
            "cuda",
            "npu",
            "xpu",
            "mps",
        }:
            found.append(f"{node.lineno} {node.value!r}")
    return found
