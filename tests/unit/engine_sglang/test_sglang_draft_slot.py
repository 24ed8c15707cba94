"""Live draft and spare in SGLang's scheduler, with torch modules that load and share as SGLang's do."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from spec_core.errors import EngineError
from spec_engine_sglang.sglang_draft_slot import SglangDraftSlot
from spec_engine_sglang.spare_model import spare_of
from spec_kit.weight_sync import DraftLayout, tensors_digest


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))


class Fused(nn.Module):
    """A layer whose parameter loads itself, part by part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * width, width))
        self.weight.weight_loader = self.weight_loader
        self.width = width

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: int) -> None:
        parameter.data[shard * self.width : (shard + 1) * self.width].copy_(loaded)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5))


class Layer(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.kv = Fused(4)
        self.norm = Norm(4)
        self.rotary = rotary


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.rotary = Rotary()


class Draft(nn.Module):
    """As SGLang's Eagle3: its embedding's weight is the target's, its token ids are replaced by loading."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.embed_tokens.weight = target.embed_tokens.weight
        self.layers = nn.ModuleList([Layer(target.rotary), Layer(target.rotary)])
        self.lm_head = nn.Linear(4, 3, bias=False)
        self.tied = self.lm_head
        self.own_rotary = Rotary()
        self.hot_token_id: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            if name == "d2t":
                assert loaded.is_cpu
                self.hot_token_id = loaded + torch.arange(len(loaded))
                continue
            stacked, _, shard = name.partition("#")
            if stacked in parameters:
                if shard:
                    parameters[stacked].weight_loader(parameters[stacked], loaded, int(shard))
                else:
                    parameters[stacked].data.copy_(loaded)


class Confidence(nn.Module):
    """As the head of SGLang's DSpark: it keeps its last output, and temperatures that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 1)
        self.register_buffer("sts_temperatures", torch.ones(()), persistent=False)
        self._last_confidence_raw: Tensor | None = None


class BlockDraft(Draft):
    """As SGLang's DSpark: the target's head is a module of the draft, and further heads belong to the draft."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.tied = self.lm_head = target.lm_head
        self.markov_head = nn.ModuleDict({"markov_w1": nn.Embedding(7, 2), "markov_w2": Norm(7)})
        self.confidence_head = Confidence()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(
            pair for pair in weights if not pair[0].startswith(("lm_head.", "embed_tokens."))
        )


class Stacking:
    """As SGLang's helper: what it derives from the layers' weights lies in memory of its own."""

    def __init__(self, layers, rotary_emb, num_kv_heads, head_dim, device, max_position_hint=None) -> None:
        self.rotary_emb, self.num_kv_heads, self.head_dim = rotary_emb, num_kv_heads, head_dim
        self.device = device
        self.flat_kv_weight_t = torch.cat([layer.kv.weight for layer in layers]).T.contiguous()
        self.k_norm_weights = torch.stack([layer.norm.weight for layer in layers])
        self._workspace = torch.randn(3)


def export(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    layers = {
        name: torch.randn(size, generator=draw)
        for index in range(2)
        for name, size in (
            (f"layers.{index}.kv.weight#0", (4, 4)),
            (f"layers.{index}.kv.weight#1", (4, 4)),
            (f"layers.{index}.norm.weight", (4,)),
        )
    }
    others = {name: torch.randn(size, generator=draw) for name, size in (("lm_head.weight", (3, 4)),)}
    embedding = {"embed_tokens.weight": torch.randn(7, 4, generator=draw)}
    return {**layers, **others, **embedding, "d2t": torch.tensor([0, 1, 3])}


class Scheduler(SimpleNamespace):
    @classmethod
    def serving(cls, algorithm: str = "DFLASH", **changes: object) -> Scheduler:
        torch.manual_seed(0)
        target = Target()
        draft = (BlockDraft if algorithm == "DSPARK" else Draft)(target)
        with torch.no_grad():
            draft.load_weights(export(1).items())
        runner = SimpleNamespace(model=draft, model_config=SimpleNamespace(quantization=None))
        layers = draft.layers
        helper = Stacking(layers, target.rotary, 1, 4, torch.device("cpu")) if algorithm == "DFLASH" else None
        worker = SimpleNamespace(draft_worker=SimpleNamespace(model_runner=runner), _fused_kv_helper=helper)
        return cls(
            spec_algorithm=SimpleNamespace(
                name=algorithm,
                is_eagle3=lambda: algorithm == "EAGLE3",
                is_dflash=lambda: algorithm == "DFLASH",
                is_dspark=lambda: algorithm == "DSPARK",
            ),
            server_args=SimpleNamespace(**({"dp_size": 1, "pp_size": 1} | changes)),
            draft_worker=worker,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
            target=target,
            draft=draft,
        )


def digest_of(slot: SglangDraftSlot, copy: str) -> str:
    return tensors_digest(slot.tensors(copy).items())


def slot_of(scheduler: Scheduler) -> SglangDraftSlot:
    return SglangDraftSlot(scheduler, DraftLayout.of_tensors(export(1).items(), "target"))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_spare_has_parameters_of_its_own_and_none_of_the_targets() -> None:
    scheduler = Scheduler.serving()
    draft, target = scheduler.draft, scheduler.target
    before, of_target = copies(draft), copies(target)
    spare = spare_of(draft, target)
    assert spare.embed_tokens.weight is None
    assert spare.own_rotary is draft.own_rotary
    assert spare.tied is spare.lm_head
    assert type(spare) is Draft
    assert {name for name, _ in spare.named_parameters()} == {
        name for name, _ in draft.named_parameters() if not name.startswith("embed_tokens")
    }
    with torch.no_grad():
        spare.load_weights(export(2).items())
        for parameter in spare.parameters():
            parameter.mul_(3)
    assert same(copies(draft), before)
    assert same(copies(target), of_target)
    theirs = {tensor.untyped_storage().data_ptr() for tensor in target.parameters()}
    assert not theirs & {tensor.untyped_storage().data_ptr() for tensor in spare.parameters()}


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "DSPARK"])
def test_a_swap_serves_what_a_fresh_load_would_and_a_second_one_what_was(algorithm) -> None:
    scheduler = Scheduler.serving(algorithm)
    slot = slot_of(scheduler)
    of_target, first = copies(scheduler.target), digest_of(slot, "live")
    helper = scheduler.draft_worker._fused_kv_helper
    held = slot.own_tensors(scheduler.draft)
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    stacked = helper.flat_kv_weight_t.data_ptr() if helper else None
    digests = []
    for seed in (2, 1, 3):
        slot.load(iter(export(seed).items()))
        digests.append(digest_of(slot, "spare"))
        before = digest_of(slot, "live")
        slot.swap()
        assert (digest_of(slot, "live"), digest_of(slot, "spare")) == (digests[-1], before)
        held = slot.own_tensors(scheduler.draft)
        assert {name: tensor.data_ptr() for name, tensor in held.items()} == addresses
        if helper:
            fresh = Stacking(scheduler.draft.layers, None, 1, 4, helper.device)
            assert torch.equal(helper.flat_kv_weight_t, fresh.flat_kv_weight_t)
            assert torch.equal(helper.k_norm_weights, fresh.k_norm_weights)
            assert helper.flat_kv_weight_t.data_ptr() == stacked
    assert digests[1] == first
    assert len(set(digests)) == 3
    slot.swap()
    assert digest_of(slot, "live") == first
    assert same(copies(scheduler.target), of_target)
    assert scheduler.draft.embed_tokens.weight is scheduler.target.embed_tokens.weight


def test_a_blocks_heads_are_exchanged_without_the_confidence_heads_last_output() -> None:
    scheduler = Scheduler.serving("DSPARK")
    slot, draft = slot_of(scheduler), scheduler.draft
    heads = {
        "markov_head.markov_w1.weight": torch.full((7, 2), 2.0),
        "confidence_head.proj.bias": torch.ones(1),
    }
    first = copies(draft)
    slot.load(iter({**export(2), **heads}.items()))
    draft.confidence_head._last_confidence_raw = torch.full((3, 2), 5.0)  # the draft ran meanwhile
    slot.swap()
    for name, expected in heads.items():
        assert torch.equal(draft.get_parameter(name), expected)
    assert draft.confidence_head._last_confidence_raw.eq(5.0).all()
    slot.load(iter({**export(2), **heads}.items()))
    slot.swap()
    assert draft.lm_head is scheduler.target.lm_head
    assert torch.equal(draft.lm_head.weight, first["lm_head.weight"])


def test_a_loader_that_collects_gets_tensors_that_stay(monkeypatch) -> None:
    """A received tensor is valid until the next one only, as where both lie in one bucket after the other."""
    load = Draft.load_weights
    monkeypatch.setattr(Draft, "load_weights", lambda self, weights: load(self, list(weights)))
    slot = slot_of(Scheduler.serving())

    def received():
        for name, tensor in export(1).items():
            yield name, tensor
            tensor.zero_()  # the next bucket has come

    slot.load(received())
    assert digest_of(slot, "spare") == digest_of(slot, "live")


def test_an_update_that_breaks_off_is_never_swapped_in() -> None:
    slot = slot_of(Scheduler.serving())
    first = digest_of(slot, "live")
    with pytest.raises(EngineError, match="no update was ever prepared"):
        digest_of(slot, "spare")

    def broken():
        yield from list(export(2).items())[:3]
        raise EngineError("lost")

    with pytest.raises(EngineError, match="lost"):
        slot.load(broken())
    with pytest.raises(EngineError, match="the spare holds no draft"):
        slot.swap()
    assert digest_of(slot, "live") == first


@pytest.mark.parametrize(
    ("algorithm", "changes", "problem"),
    [
        ("EAGLE", {}, "EAGLE takes no fresh weights here"),
        ("EAGLE3", {"dp_size": 2}, "data- or pipeline-parallel"),
    ],
)
def test_drafts_that_cannot_be_exchanged_are_refused(algorithm, changes, problem) -> None:
    with pytest.raises(EngineError, match=problem):
        slot_of(Scheduler.serving(algorithm, **changes))


@pytest.mark.parametrize("method", ["_fused_kv_write_bundle", "_stacked_ctx_kv_params"])
def test_a_block_whose_weights_are_copied_elsewhere_is_refused(monkeypatch, method) -> None:
    monkeypatch.setattr(BlockDraft, method, lambda self: None, raising=False)
    with pytest.raises(EngineError, match="keeps copies of a DSpark draft's weights"):
        slot_of(Scheduler.serving("DSPARK"))


def test_a_quantized_draft_is_refused() -> None:
    scheduler = Scheduler.serving()
    scheduler.draft_worker.draft_worker.model_runner.model_config.quantization = "fp8"
    with pytest.raises(EngineError, match=r"has quantized the draft \(fp8\)"):
        slot_of(scheduler)
