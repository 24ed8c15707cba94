"""Live draft and spare in SGLang's scheduler, with torch modules that load and share as SGLang's do."""

import pytest
import torch
from tests.unit.engine_sglang.played_scheduler import Draft, Scheduler, Stacking, export, slot_of
from torch import Tensor, nn

from spec_core.errors import EngineError
from spec_engine_sglang.sglang_draft_slot import SglangDraftSlot
from spec_engine_sglang.spare_model import spare_of
from spec_kit.weight_sync import tensors_digest


def digest_of(slot: SglangDraftSlot, copy: str) -> str:
    return tensors_digest(slot.tensors(copy).items())


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
