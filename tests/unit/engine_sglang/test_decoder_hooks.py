"""The hook on decoders of other kinds, beside SGLang's own ways to collect states."""

from types import SimpleNamespace

import pytest
import torch
from tests.unit.engine_sglang.played_decoders import (
    SCHEMA,
    CollectedLayer,
    Exported,
    Layer,
    Model,
    NewLayer,
    Runner,
    batch_of,
    expected,
    ids_of,
)

from spec_core.errors import EngineError
from spec_engine_sglang.state_capture import StateCapture


def test_a_decoder_of_an_unknown_kind_is_refused():
    class Plain(Layer):
        def forward(self, hidden_states):
            return hidden_states

    with pytest.raises(
        EngineError, match=r"layers of a kind that cannot be captured: Plain\(hidden_states\)"
    ):
        StateCapture(Model(Plain), Exported(), SCHEMA, "norm")
    with pytest.raises(EngineError, match="no decoder with 'layers' and 'ln_f'"):
        StateCapture(Model(), Exported(), SCHEMA, "ln_f")


def test_a_collector_of_sglangs_own_still_collects():
    runner, collected = Runner(CollectedLayer), []
    layer, name = runner.model.model.layers[1], "captured_last_layer_outputs"
    theirs = SimpleNamespace(capture=lambda hidden, owned: collected.append((hidden.clone(), owned)))
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, name: theirs}), with_kwargs=True, prepend=True
    )
    ids = ids_of(1, 3)
    runner.forward(batch_of((1, ids, 0, 3)))
    ((hidden, owned),) = collected
    assert owned
    states_TNH = expected(runner, ids)
    torch.testing.assert_close(hidden, states_TNH[:, SCHEMA.layers.index(1)])
    torch.testing.assert_close(runner.exporter.states[1], states_TNH)


def test_a_callback_of_sglangs_own_is_still_called():
    runner = Runner(NewLayer)
    taken = []
    layer = runner.model.model.layers[1]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "capture_output": lambda h, **how: taken.append(how)}),
        with_kwargs=True,
        prepend=True,
    )
    ids = ids_of(1, 3)
    runner.forward(batch_of((1, ids, 0, 3)))
    assert taken == [{"owned": True}]
    torch.testing.assert_close(runner.exporter.states[1], expected(runner, ids))
