"""Buckets hold every tensor once, aligned, within the bound."""

import pytest
import torch

from spec_core import Manifest
from spec_kit.weight_sync.buckets import ALIGNMENT, BucketPlan
from spec_kit.weight_sync.digest import tensor_entry
from spec_testing.weight_stage import odd_weights, same_bytes


def manifest_of(weights):
    entries = tuple(tensor_entry(name, tensor) for name, tensor in weights.items())
    return Manifest(group="g", version=1, fence=1, target="t", tensors=entries)


@pytest.mark.parametrize("bucket_bytes", [1, 256, 300, 4096, 1 << 30])
def test_what_was_packed_is_unpacked(bucket_bytes):
    weights = odd_weights(1)
    plan = BucketPlan.of(manifest_of(weights), bucket_bytes)
    bucket = torch.full((plan.bucket_bytes,), 0xA5, dtype=torch.uint8)
    found = {name: tensor.clone() for name, tensor in plan.unpack(plan.pack(weights, bucket))}
    assert list(found) == list(weights)
    assert all(same_bytes(found[name], weights[name]) for name in weights)


def test_bucket_is_never_larger_than_the_payload():
    plan = BucketPlan.of(manifest_of({"a": torch.zeros(10)}), 1 << 30)
    assert plan.bucket_bytes == ALIGNMENT


def test_tensor_that_fits_is_not_cut():
    weights = {"a": torch.zeros(40), "b": torch.zeros(64), "c": torch.zeros(1000)}
    pieces = BucketPlan.of(manifest_of(weights), 512).pieces
    assert [[(piece.entry.name, piece.start, piece.size) for piece in bucket] for bucket in pieces] == [
        [("a", 0, 160), ("b", 0, 256)], [("c", 0, 512)], [("c", 512, 512)], [("c", 1024, 512)],
        [("c", 1536, 512)], [("c", 2048, 512)], [("c", 2560, 512)], [("c", 3072, 512)], [("c", 3584, 416)],
    ]  # fmt: skip


def test_update_without_tensors_has_one_empty_bucket():
    plan = BucketPlan.of(manifest_of({}), 512)
    assert (len(plan.pieces), plan.bucket_bytes) == (1, 0)
