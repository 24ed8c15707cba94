"""Layout of micro-batches: packed, padded and empty."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_core.records import FeatureSchema, Span
from spec_trainer.data.dataset import Sample
from spec_trainer.data.packing import empty_batch

SCHEMA = FeatureSchema(layers=(1, 2, 4), hidden_size=6, dtype="bfloat16")
SAMPLES = [
    Sample(4, np.array([1, 2, 3], dtype=np.int32), np.array([False, True, True])),
    Sample(9, np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([True, False, False, False, True])),
    Sample(2, np.array([3, 4], dtype=np.int32), np.array([False, False])),
]


def layout(samples, packing):
    return empty_batch(samples, SCHEMA, packing=packing, seed=11, epoch=3)


def test_packed_documents_touch():
    batch = layout(SAMPLES, packing=True)
    assert [(span.sample_id, span.start, span.stop) for span in batch.spans] == [
        (4, 0, 3),
        (9, 3, 8),
        (2, 8, 10),
    ]
    assert batch.input_ids_T.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 3, 4]
    assert batch.loss_mask_T.tolist() == [False, True, True, True, False, False, False, True, False, False]
    assert batch.position_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]


def test_unpacked_documents_are_padded_to_the_longest():
    batch = layout(SAMPLES, packing=False)
    assert [(span.start, span.stop) for span in batch.spans] == [(0, 3), (5, 10), (10, 12)]
    assert batch.input_ids_T.tolist() == [1, 2, 3, 0, 0, 5, 6, 7, 8, 9, 3, 4, 0, 0, 0]
    assert batch.host_position_T.tolist() == [0, 1, 2, -1, -1, 0, 1, 2, 3, 4, 0, 1, -1, -1, -1]
    assert batch.loss_mask_T.tolist() == [
        False, True, True, False, False, True, *[False] * 3, True, *[False] * 5,
    ]  # fmt: skip


@pytest.mark.parametrize("packing", [True, False])
def test_tensors_have_the_schemas_shape_and_types_and_features_are_zero(packing):
    batch = layout(SAMPLES, packing)
    assert batch.hidden_TNH.shape == SCHEMA.shape(len(batch.input_ids_T))
    assert batch.hidden_TNH.dtype == torch.bfloat16
    assert not batch.hidden_TNH.any()
    assert (batch.input_ids_T.dtype, batch.loss_mask_T.dtype) == (torch.int64, torch.bool)
    assert batch.seed == 11
    assert batch.spans[0] == Span(sample_id=4, epoch=3, start=0, stop=3)


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_without_samples_is_a_little_padding(packing):
    batch = layout([], packing)
    assert batch.spans == ()
    assert 0 < len(batch.input_ids_T) <= 8
    assert not batch.loss_mask_T.any()
    assert not batch.input_ids_T.any()
    assert batch.hidden_TNH.shape == SCHEMA.shape(len(batch.input_ids_T))


def test_a_batch_to_evaluate_has_no_guess_depths():
    judged = [replace(SAMPLES[0], guess_depth=np.array([0, 1, 2], dtype=np.int32))]
    for evaluates in (False, True):
        batch = empty_batch(judged, SCHEMA, packing=True, seed=11, epoch=3, evaluates=evaluates)
        assert (batch.evaluates, batch.guess_depth_T is None) == (evaluates, evaluates)


def test_the_batch_does_not_share_memory_with_the_samples():
    batch = layout(SAMPLES, packing=True)
    batch.input_ids_T.zero_()
    batch.loss_mask_T.fill_(True)
    assert SAMPLES[0].input_ids.tolist() == [1, 2, 3]
    assert SAMPLES[0].loss_mask.tolist() == [False, True, True]
