"""The exchange of two models in vLLM's worker, on a card that is not the first: whole, or none."""

import fake_cann
import pytest
import torch

from ..unit.engine_vllm.test_tensor_exchange import (  # noqa: F401 (fixtures, and a test that runs here too)
    Planted,
    exchange_of,
    live,
    owned,
    plant,
    same,
    small_spans,
    spare,
    steps_of,
    target,
    test_what_both_own_is_exchanged_in_place_and_back,
)


@pytest.fixture(autouse=True)
def _on_a_card():
    before = torch.npu.current_device()
    torch.npu.set_device(1)
    with torch.device("npu", 1):
        yield
    torch.npu.set_device(before)


def test_a_fault_leaves_both_models_as_they_were_while_the_stream_is_late(target, live, spare):  # noqa: F811
    assert live.odd.device == torch.device("npu", 1)
    first, second = owned(live), owned(spare)
    exchange = exchange_of(live, spare, target)
    count = steps_of(exchange)
    for number in (0, count // 2, count - 1):
        fake_cann.stall(torch.npu.current_stream(), 0.05)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, lambda call, number=number: call == number, is_after=True)
            with pytest.raises(Planted):
                exchange.run()
        assert same(owned(live), first)
        assert same(owned(spare), second)
    exchange.run()
    assert same(owned(live), second)
