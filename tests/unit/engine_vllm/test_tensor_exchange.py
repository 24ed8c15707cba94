"""An exchange of two models is whole, or none, wherever it fails."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from spec_core.errors import EngineError
from spec_engine_vllm import packed_weights
from spec_engine_vllm.packed_weights import PACKED, packed_steps
from spec_kit.weight_sync import Exchange, tensor_exchange
from spec_kit.weight_sync.tensor_exchange import TornDraftError


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.rotary = torch.arange(4.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        setattr(self, PACKED, object())
        self.kv_cache = torch.randn(2, 2)


class Draft(nn.Module):
    """A module as vLLM's drafts: parts of the target, derived tensors, aliases, packed weights, keys and values."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed = target.embed
        self.rotary = target.rotary
        self.layer = Layer()
        self.norm = nn.LayerNorm(7)
        self.norm_alias = self.norm.weight.data
        self.stacked = [torch.randn(3), torch.randn(2, 2)]
        self.register_buffer("map", torch.randint(0, 99, (3,)))
        self.odd = torch.randn(11, dtype=torch.bfloat16)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)


@pytest.fixture(autouse=True)
def small_spans(monkeypatch) -> None:
    """Most tensors take several of them."""
    monkeypatch.setattr(tensor_exchange, "_SPAN_BYTES", 9)


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    return Target()


@pytest.fixture
def live(target) -> Draft:
    return Draft(target)


@pytest.fixture
def spare(target) -> Draft:
    draft = Draft(target)
    draft.embed = nn.Identity()
    return draft


def owned_tensors(model: nn.Module, foreign: nn.Module) -> dict[str, torch.Tensor]:
    of_target = tensor_exchange.storage_addresses(foreign)
    tensors = tensor_exchange.plain_tensors(model, ("kv_cache",))
    return {
        path: tensor
        for path, tensor in tensors.items()
        if tensor_exchange.storage_address(tensor) not in of_target
    }


def exchange_of(live: Draft, spare: Draft, target: Target) -> Exchange:
    tensors = [owned_tensors(model, target) for model in (live, spare)]
    return Exchange(*tensors, packed_steps(live, spare, target))


def content(model: Draft) -> dict[str, object]:
    tensors = {name: tensor.clone() for name, tensor in owned_tensors(model, Target()).items()}
    return {**tensors, "packed": model.layer.__dict__[PACKED], "cache": model.layer.kv_cache.clone()}


def same(ours: dict[str, object], theirs: dict[str, object]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value is theirs[name]
        for name, value in ours.items()
    )


def owned(model: Draft) -> dict[str, object]:
    left_out = (".embed", "embed.", ".rotary", "cache")
    return {name: value for name, value in content(model).items() if not name.startswith(left_out)}


def test_what_both_own_is_exchanged_in_place_and_back(target, live, spare) -> None:
    first, second, shared = owned(live), owned(spare), target.embed.weight.clone()
    addresses = {name: tensor.data_ptr() for name, tensor in owned_tensors(live, target).items()}
    exchange = exchange_of(live, spare, target)
    exchange.run()
    assert same(owned(live), second)
    assert same(owned(spare), first)
    assert torch.equal(live.norm_alias, live.norm.weight)
    assert {name: tensor.data_ptr() for name, tensor in owned_tensors(live, target).items()} == addresses
    exchange.run()
    assert same(owned(live), first)
    assert same(owned(spare), second)
    assert torch.equal(target.embed.weight, shared)
    assert live.embed is target.embed


def test_keys_values_and_parts_of_the_target_stay(target, live, spare) -> None:
    cache, rotary = live.layer.kv_cache.clone(), target.rotary.clone()
    exchange_of(live, spare, target).run()
    assert torch.equal(live.layer.kv_cache, cache)
    assert torch.equal(target.rotary, rotary)
    assert not {name for name in owned_tensors(live, target) if "cache" in name or "embed" in name}


class Planted(Exception):
    pass


def plant(
    monkeypatch, fails: Callable[[int], bool], is_after: bool, error: type[BaseException] = Planted
) -> Iterator[int]:
    calls = itertools.count()
    for module, name in (
        (tensor_exchange, "_copy"),
        (packed_weights, "_assign"),
        (packed_weights, "_packed"),
    ):
        function = getattr(module, name)

        def faulty(*args, function=function) -> object:
            number = next(calls)
            result = function(*args) if is_after or not fails(number) else None
            if fails(number):
                raise error(f"at {number}")
            return result

        monkeypatch.setattr(module, name, faulty)
    return calls


def steps_of(exchange: Exchange) -> int:
    with pytest.MonkeyPatch.context() as patch:
        calls = plant(patch, lambda number: False, is_after=True)
        exchange.run()
        exchange.run()
    return next(calls) // 2


@pytest.mark.parametrize("error", [Planted, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_fault_at_any_statement_leaves_both_models_as_they_were(
    target, live, spare, is_after, error
) -> None:
    first, second = owned(live), owned(spare)
    exchange = exchange_of(live, spare, target)
    count = steps_of(exchange)
    assert count > 50
    for index in range(count):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, lambda number, index=index: number == index, is_after, error)
            with pytest.raises(error, match=f"at {index}"):
                exchange.run()
        assert same(owned(live), first), index
        assert same(owned(spare), second), index
    exchange.run()
    assert same(owned(live), second)


def test_a_fault_before_the_first_step_of_a_second_exchange_undoes_nothing(target, live, spare) -> None:
    exchange = exchange_of(live, spare, target)
    exchange.run()
    first, second = owned(live), owned(spare)
    for step in (tensor_exchange._Span, packed_weights.PackedExchange):
        with pytest.MonkeyPatch.context() as patch:
            real = step.exchange
            calls = itertools.count()

            def faulty(self, real=real, calls=calls) -> None:
                if next(calls) == 0:
                    raise Planted
                real(self)

            patch.setattr(step, "exchange", faulty)
            with pytest.raises(Planted):
                exchange.run()
        assert same(owned(live), first)
        assert same(owned(spare), second)


def test_a_fault_that_stays_is_told_apart(target, live, spare) -> None:
    exchange = exchange_of(live, spare, target)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, lambda number: number >= 4, is_after=False)
        with pytest.raises(TornDraftError, match="half exchanged: at 4; then at 5"):
            exchange.run()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(
            lambda draft: setattr(draft, "odd", torch.zeros(12)), r"\.odd is float32\[12\]", id="shape"
        ),
        pytest.param(
            lambda draft: delattr(draft, "odd"), r"\.odd is nothing, expected bfloat16\[11\]", id="missing"
        ),
        pytest.param(lambda draft: setattr(draft, "more", torch.zeros(1)), r"expected nothing", id="besides"),
        pytest.param(
            lambda draft: setattr(draft, "norm_alias", torch.zeros(7)), "shares other memory", id="alias"
        ),
    ],
)
def test_models_that_differ_are_refused(target, live, spare, change, problem) -> None:
    change(spare)
    with pytest.raises(EngineError, match=problem):
        exchange_of(live, spare, target)
