"""The hook's work in SGLang's process, on small decoders in SGLang's two calling conventions."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spec_core.errors import EngineError
from spec_core.records import FeatureSchema
from spec_engine_sglang.request_names import Assignment, name_of
from spec_engine_sglang.state_capture import StateCapture, pieces_of

from .stand_in import stand_in_model

Layer, Norm = stand_in_model.Layer, stand_in_model.Norm
WIDTH, LAYERS, TOKENS = 8, 3, 50
SCHEMA = FeatureSchema(layers=(0, 1, 3), hidden_size=WIDTH, dtype="float32")


class LateLayer(Layer):
    """Qwen3-VL in 0.5.16: what images add behind a layer is given to the next one."""

    LATE = 0.5

    def forward(self, positions, hidden_states, forward_batch, residual, post_residual_addition=None):
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        return super().forward(positions, hidden_states, forward_batch, residual)


class OpenLateLayer(LateLayer):
    """Qwen3-VL with experts in 0.5.16: the argument has no name."""

    def forward(self, positions, hidden_states, forward_batch, residual, **kwargs):
        return super().forward(positions, hidden_states, forward_batch, residual, **kwargs)


class NewLayer(Layer):
    """SGLang 0.5.23: the batch carries the residual; a callback is given the sum, which it must copy."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        residual = forward_batch.residual
        if residual is None and capture_output is not None:
            capture_output(hidden_states)
        elif capture_output is not None:
            capture_output(hidden_states + residual, owned=True)
        hidden, forward_batch.residual = super().forward(positions, hidden_states, forward_batch, residual)
        return hidden


class CollectedLayer(NewLayer):
    """SGLang 0.5.23, Qwen3.5 and DeepSeek: a collector is given the sum."""

    attn_boundary = object()

    def forward(self, positions, hidden_states, forward_batch, captured_last_layer_outputs=None, **kwargs):
        given = captured_last_layer_outputs
        capture_output = None if given is None else given.capture
        return super().forward(positions, hidden_states, forward_batch, capture_output)


class OpenLayer(CollectedLayer):
    """Qwen3.5's recurrent layers in 0.5.23: their arguments have no names."""

    def forward(self, positions, hidden_states, *rest, **kwargs):
        (forward_batch,) = rest
        collector = kwargs.get("captured_last_layer_outputs")
        return super().forward(positions, hidden_states, forward_batch, collector)


class Decoder(nn.Module):
    def __init__(self, layer_type):
        super().__init__()
        self.embed_tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(layer_type(WIDTH) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, input_ids, positions, forward_batch):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            if isinstance(layer, NewLayer):
                hidden, residual = layer(positions, hidden, forward_batch), forward_batch.residual
            elif isinstance(layer, LateLayer) and residual is not None:
                late = torch.full_like(residual, LateLayer.LATE)
                hidden, residual = layer(
                    positions, hidden, forward_batch, residual, post_residual_addition=late
                )
            else:
                hidden, residual = layer(positions, hidden, forward_batch, residual)
        return self.norm(hidden, residual)[0]


class Model(nn.Module):
    def __init__(self, layer_type=Layer):
        super().__init__()
        self.model = Decoder(layer_type)


@dataclass
class Mode:
    extend: bool = True

    def is_extend(self):
        return self.extend


@dataclass
class Batch:
    """The fields of SGLang's ForwardBatch that are read."""

    rids: list[str]
    input_ids: torch.Tensor
    extend_seq_lens_cpu: list[int] | None
    extend_prefix_lens_cpu: list[int] | None
    forward_mode: Mode = field(default_factory=Mode)
    residual: torch.Tensor | None = None


class Exported:
    """An exporter that keeps what it is given."""

    def __init__(self):
        self.states: dict[int, torch.Tensor] = {}
        self.ids: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}

    def export(self, request_id, destinations, token_ids, hidden_TNH):
        assert request_id not in self.states, "exported twice"
        assert destinations == ("0", "2")
        assert not token_ids.is_inference()
        self.ids[request_id], self.states[request_id] = token_ids.tolist(), hidden_TNH

    def fail(self, request_id, error):
        self.errors[request_id] = str(error)


def batch_of(*parts, mode=None):
    """``parts``: (request id, ids of the whole request, first, stop)."""
    rows = [ids[first:stop] for _, ids, first, stop in parts]
    return Batch(
        rids=[name_of(Assignment(key, len(ids), ("0", "2"))) for key, ids, _, _ in parts],
        input_ids=torch.tensor([token for row in rows for token in row]),
        extend_seq_lens_cpu=[len(row) for row in rows],
        extend_prefix_lens_cpu=[first for _, _, first, _ in parts],
        forward_mode=mode or Mode(),
    )


class Runner:
    """As much of SGLang's ModelRunner as a pass needs."""

    def __init__(self, layer_type=Layer, schema=SCHEMA, image=()):
        torch.manual_seed(0)
        self.model, self.exporter = Model(layer_type), Exported()
        self.capture = StateCapture(self.model, self.exporter, schema, "norm", image)
        self.forward = self.capture.around(self._forward)
        self.extra_rows = 0

    def _forward(self, batch, pp_proxy_tensors=None):
        with torch.inference_mode():
            positions = torch.cat(
                [
                    torch.arange(first, first + length)
                    for first, length in zip(
                        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True
                    )
                ]
            )
            pad = torch.zeros(self.extra_rows, dtype=torch.int64)
            ids, positions = torch.cat([batch.input_ids, pad]), torch.cat([positions, pad])
            batch.input_ids.fill_(
                0
            )  # SGLang may give its memory away while the exporter has not read the ids yet
            return self.model.model(ids, positions, batch)


def expected(runner, ids, late=0.0):
    """The stream computed out of place, from the same weights; ``late`` is added behind all layers but the last."""
    decoder = runner.model.model
    with torch.no_grad():
        stream = decoder.embed_tokens(torch.tensor(ids))
        states = [stream]
        for layer in decoder.layers:
            update = layer.linear(torch.tanh(states[-1])) + torch.arange(len(ids))[:, None] / 100
            states.append(states[-1] + update + (late if layer is not decoder.layers[-1] else 0))
    return torch.stack([states[layer] for layer in SCHEMA.layers], dim=1)


def ids_of(key, length):
    return [(7 * key + 3 * index) % TOKENS for index in range(length)]


@pytest.mark.parametrize("layer_type", [Layer, NewLayer, CollectedLayer, OpenLayer])
def test_requests_of_a_batch_get_their_own_rows(layer_type):
    runner = Runner(layer_type)
    requests = {key: ids_of(key, length) for key, length in ((1, 5), (2, 1), (3, 4))}
    runner.forward(batch_of(*((key, ids, 0, len(ids)) for key, ids in requests.items())))
    assert runner.exporter.ids == requests
    for key, ids in requests.items():
        torch.testing.assert_close(runner.exporter.states[key], expected(runner, ids))


@pytest.mark.parametrize("layer_type", [LateLayer, OpenLateLayer])
def test_what_images_add_behind_a_layer_is_in_the_states(layer_type):
    runner, ids = Runner(layer_type), ids_of(1, 5)
    runner.forward(batch_of((1, ids, 0, 5)))
    torch.testing.assert_close(runner.exporter.states[1], expected(runner, ids, LateLayer.LATE))


def test_digests_of_images_become_their_token_again():
    """SGLang writes numbers beyond the vocabulary in the place of an image's tokens."""
    runner = Runner(image=(TOKENS, 7))
    runner.model.model.embed_tokens = nn.Embedding(2 * TOKENS, WIDTH)
    ids = [3, TOKENS + 4, TOKENS + 4, 5, TOKENS + 20]
    runner.forward(batch_of((1, ids, 0, 5)))
    assert runner.exporter.ids == {1: [3, 7, 7, 5, 7]}
    torch.testing.assert_close(runner.exporter.states[1], expected(runner, ids))


@pytest.mark.parametrize("layer_type", [Layer, NewLayer])
def test_a_chunked_prompt_is_put_together(layer_type):
    runner = Runner(layer_type)
    long, short, other = ids_of(1, 10), ids_of(2, 3), ids_of(3, 2)
    runner.forward(batch_of((2, short, 0, 3), (1, long, 0, 4)))
    assert list(runner.exporter.states) == [2]
    runner.forward(batch_of((1, long, 4, 9)))
    runner.forward(batch_of((1, long, 9, 10), (3, other, 0, 2)))
    assert runner.exporter.ids == {1: long, 2: short, 3: other}
    for key, ids in runner.exporter.ids.items():
        torch.testing.assert_close(runner.exporter.states[key], expected(runner, ids))
    assert not runner.exporter.errors


def test_states_are_ordinary_tensors_of_the_schemas_dtype():
    """An inference tensor could not be sent by every transport."""
    schema = FeatureSchema(layers=(1,), hidden_size=WIDTH, dtype="bfloat16")
    runner = Runner(schema=schema)
    runner.forward(batch_of((1, ids_of(1, 3), 0, 3)))
    states = runner.exporter.states[1]
    assert (states.dtype, states.shape) == (torch.bfloat16, (3, 1, WIDTH))
    assert not states.is_inference()


def test_rows_of_a_batch_that_are_padding_are_left_out():
    runner = Runner()
    runner.extra_rows = 3
    ids = ids_of(1, 4)
    runner.forward(batch_of((1, ids, 0, 4)))
    torch.testing.assert_close(runner.exporter.states[1], expected(runner, ids))


def test_rows_that_come_from_a_cache_fail_the_request_alone():
    runner = Runner()
    cached, whole = ids_of(1, 6), ids_of(2, 3)
    runner.forward(batch_of((1, cached, 2, 6), (2, whole, 0, 3)))
    assert runner.exporter.errors == {1: "SGLang did not compute tokens 0 to 1 of the prompt (a cache?)"}
    assert list(runner.exporter.states) == [2]


def test_a_gap_between_chunks_fails_the_request():
    runner = Runner()
    ids = ids_of(1, 9)
    runner.forward(batch_of((1, ids, 0, 3)))
    runner.forward(batch_of((1, ids, 5, 9)))
    assert runner.exporter.errors == {1: "SGLang did not compute tokens 3 to 4 of the prompt (a cache?)"}


def test_a_request_that_is_started_anew_is_delivered_once():
    runner = Runner()
    ids = ids_of(1, 6)
    runner.forward(batch_of((1, ids, 0, 4)))
    runner.forward(batch_of((1, ids, 0, 6)))
    torch.testing.assert_close(runner.exporter.states[1], expected(runner, ids))


def test_a_pass_that_calls_no_layer_is_told():
    """So does the replay of a CUDA graph."""
    runner = Runner()
    forward = runner.capture.around(lambda batch: None)
    forward(batch_of((1, ids_of(1, 3), 0, 3)))
    assert "without calling layers [0, 1, 3]" in runner.exporter.errors[1]
    runner.forward(batch_of((2, ids_of(2, 3), 0, 3)))
    assert list(runner.exporter.states) == [2]


def test_partial_sums_of_tensor_parallel_ranks_are_told():
    runner = Runner()

    def mark(module, args):
        args[1]._sglang_needs_allreduce_fusion = True

    runner.model.model.layers[1].register_forward_pre_hook(mark, prepend=True)
    runner.forward(batch_of((1, ids_of(1, 3), 0, 3)))
    assert "partial sum" in runner.exporter.errors[1]


def test_rows_that_are_spread_over_ranks_are_told():
    runner = Runner()
    runner.model.model.layers[2].register_forward_pre_hook(
        lambda module, args: (args[0][:2], args[1][:2], args[2], args[3][:2]), prepend=True
    )
    runner.forward(batch_of((1, ids_of(1, 3), 0, 3)))
    assert "expected [3 or more, 8]" in runner.exporter.errors[1]


@pytest.mark.parametrize(
    "batch",
    [
        batch_of((1, ids_of(1, 3), 0, 3), mode=Mode(extend=False)),
        Batch(["warm-up"], torch.tensor([1, 2]), [2], [0]),
        Batch(
            [name_of(Assignment(1, 4, ("0", "2")))], torch.tensor([9]), [1], [4]
        ),  # decodes, in a mixed batch
        Batch([name_of(Assignment(1, 4, ("0", "2")))], torch.tensor([9]), None, None),
    ],
)
def test_other_passes_are_none_of_our_business(batch):
    assert pieces_of(batch) == []


def test_rows_of_a_stranger_are_skipped():
    batch = batch_of((1, ids_of(1, 2), 0, 2), (2, ids_of(2, 3), 0, 3))
    batch.rids[0] = "warm-up"
    (piece,) = pieces_of(batch)
    assert (piece.request.request_id, piece.start, piece.stop) == (2, 2, 5)


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
