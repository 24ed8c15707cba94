"""The hook's work in SGLang's process, on small decoders in SGLang's two calling conventions."""

import pytest
import torch
from tests.unit.engine_sglang.played_decoders import (
    TOKENS,
    WIDTH,
    Batch,
    CollectedLayer,
    LateLayer,
    Layer,
    Mode,
    NewLayer,
    Runner,
    batch_of,
    expected,
    ids_of,
)
from torch import nn

from spec_core.records import FeatureSchema
from spec_engine_sglang.request_names import Assignment, name_of
from spec_engine_sglang.state_capture import pieces_of


class OpenLateLayer(LateLayer):
    """Qwen3-VL with experts in 0.5.16: the argument has no name."""

    def forward(self, positions, hidden_states, forward_batch, residual, **kwargs):
        return super().forward(positions, hidden_states, forward_batch, residual, **kwargs)


class OpenLayer(CollectedLayer):
    """Qwen3.5's recurrent layers in 0.5.23: their arguments have no names."""

    def forward(self, positions, hidden_states, *rest, **kwargs):
        (forward_batch,) = rest
        collector = kwargs.get("captured_last_layer_outputs")
        return super().forward(positions, hidden_states, forward_batch, collector)


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
