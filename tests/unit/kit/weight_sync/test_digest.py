"""A tensor's digest against plain integers, and what it must tell apart."""

from __future__ import annotations

import random

import pytest
import torch

from spec_kit.weight_sync.digest import COLUMNS, tensor_digest, tensor_entries, tensors_digest

WORD = (1 << 64) - 1
ROW_BYTES = COLUMNS * 8


def splitmix(seed: int, index: int) -> int:
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31) | 1


def reference(content: bytes) -> str:
    digits = ""
    for seed in (0x9AE16A3B2F90404F, 0xC949C7DEFE7F8C1D):
        total = splitmix(seed ^ 0xE7037ED1A0B428DB, 0) * len(content)
        for index in range(0, len(content), 8):
            word = int.from_bytes(content[index : index + 8].ljust(8, b"\0"), "little")
            product = word * 0xD6E8FEB86659FD93 & WORD
            row, column = divmod(index // 8, COLUMNS)
            factor = splitmix(seed, column) * splitmix(seed ^ 0xA0761D6478BD642F, row)
            total += (product ^ (product >> 32)) * factor
        digits += f"{total & WORD:016x}"
    return digits


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9])
def test_digest_is_the_one_of_plain_integers(size):
    content = random.Random(size).randbytes(size)
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    assert tensor_digest(tensor) == reference(content)


def test_blocks_of_a_large_tensor_are_added_up(monkeypatch):
    tensor = torch.randint(256, (3 * ROW_BYTES + 5,), dtype=torch.uint8)
    whole = tensor_digest(tensor)
    monkeypatch.setattr("spec_kit.weight_sync.digest._BLOCK_BYTES", ROW_BYTES)
    assert tensor_digest(tensor) == whole


def test_tensors_that_share_a_block_do_not_touch_each_other(monkeypatch):
    monkeypatch.setattr("spec_kit.weight_sync.digest._BLOCK_BYTES", 2 * ROW_BYTES)
    memory = torch.randint(256, (12 * ROW_BYTES,), dtype=torch.uint8)
    sizes = {
        0: 5 * ROW_BYTES + 40,
        8 * ROW_BYTES: 16,
        9 * ROW_BYTES + 3: 2 * ROW_BYTES + 1,
        3: 0,
        1: ROW_BYTES,
    }
    parts = [memory[start : start + size] for start, size in sizes.items()]  # some begin at odd addresses
    together = tensor_entries((str(place), part) for place, part in enumerate(parts))
    assert [entry.digest for entry in together] == [tensor_digest(part.clone()) for part in parts]
    assert together[0].digest != together[3].digest


def test_digest_reads_bytes_in_the_tensors_order_wherever_they_lie():
    tensor = torch.randn(6, 5)
    wider = torch.zeros(40, dtype=torch.uint8)
    wider[3:11] = torch.arange(8, dtype=torch.uint8)
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous()) != tensor_digest(tensor)
    assert tensor_digest(wider[3:11]) == tensor_digest(torch.arange(8, dtype=torch.uint8))


def test_one_flipped_bit_shows():
    tensor = torch.randn(300)
    digests = {tensor_digest(tensor)}
    for bit in range(32):
        damaged = tensor.clone()
        damaged.view(torch.int32)[bit * 7] ^= 1 << bit if bit < 31 else -(1 << 31)
        digests.add(tensor_digest(damaged))
    assert len(digests) == 33


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_elements_that_change_places_show_also_where_only_the_sign_differs(dtype):
    tensor = torch.ones(40, dtype=dtype)
    tensor[::2] *= -1
    swapped = tensor.clone()
    swapped[[8, 9]] = tensor[[9, 8]]
    assert tensor_digest(tensor) != tensor_digest(swapped)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_signs_of_many_elements_show(dtype):
    tensor = (torch.arange(64) + 1).to(dtype)
    half = tensor.clone()
    half[:32] *= -1
    assert len({tensor_digest(each) for each in (tensor, -tensor, half)}) == 3


def test_length_counts():
    assert len({tensor_digest(torch.zeros(size)) for size in range(5)}) == 5


def test_names_shapes_and_dtypes_count_and_order_does_not():
    one, two = torch.arange(4.0), torch.arange(4.0) + 1
    digest = tensors_digest([("a", one), ("b", two)])
    assert digest == tensors_digest([("b", two), ("a", one)])
    others = [
        tensors_digest([("a", two), ("b", one)]),
        tensors_digest([("a", one), ("c", two)]),
        tensors_digest([("a", one.view(2, 2)), ("b", two)]),
        tensors_digest([("a", one.view(torch.int32)), ("b", two)]),
        tensors_digest([("a", one)]),
    ]
    assert len({digest, *others}) == 6
