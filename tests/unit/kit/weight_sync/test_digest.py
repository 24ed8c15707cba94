"""A tensor's digest against plain integers, and what it must tell apart."""

import functools
import hashlib
import operator
import random

import pytest
import torch

from spec_kit.weight_sync.digest import (
    ROW_BYTES,
    ROW_WORDS,
    TensorDigests,
    tensor_digest,
    tensor_entries,
    tensors_digest,
)


def reference(content: bytes) -> str:
    hashed = len(content).to_bytes(8, "little")
    end = len(content) // ROW_BYTES * ROW_BYTES
    words = [int.from_bytes(content[index : index + 8], "little") for index in range(0, end, 8)]
    rows = [words[index : index + ROW_WORDS] for index in range(0, len(words), ROW_WORDS)]
    for line in [*rows, *zip(*rows, strict=True)]:
        hashed += functools.reduce(operator.xor, line).to_bytes(8, "little")
    return hashlib.sha256(hashed + content[end:]).hexdigest()[:32]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, 3 * ROW_BYTES])
def test_digest_is_the_one_of_plain_integers(size):
    content = random.Random(size).randbytes(size)
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    assert tensor_digest(tensor) == reference(content)


def test_tensors_that_share_a_block_do_not_touch_each_other():
    memory = torch.randint(256, (12 * ROW_BYTES,), dtype=torch.uint8)
    sizes = {
        0: 5 * ROW_BYTES + 40,
        8 * ROW_BYTES: 16,
        9 * ROW_BYTES + 3: 2 * ROW_BYTES + 1,
        3: 0,
        1: ROW_BYTES,
    }
    parts = [memory[start : start + size] for start, size in sizes.items()]  # some begin at odd addresses
    together = tensor_entries((str(index), part) for index, part in enumerate(parts))
    assert [entry.digest for entry in together] == [tensor_digest(part.clone()) for part in parts]
    assert together[0].digest != together[3].digest


def test_what_was_added_may_change_before_the_digests_are_asked_for():
    tensors = {"short": torch.ones(5), "long": torch.ones(ROW_BYTES)}
    expected = [tensor_digest(tensor) for tensor in tensors.values()]
    digests = TensorDigests()
    digests.add(tensors.items())
    for tensor in tensors.values():
        tensor.zero_()
    assert [entry.digest for entry in digests.entries()] == expected


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


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
SHAPES = [(40,), (64, ROW_WORDS - 1), (2 * ROW_WORDS, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_change_places_show_also_where_only_the_sign_differs(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    tensor.view(-1)[::2] *= -1
    swapped = tensor.clone()
    swapped.view(-1)[[8, 9]] = tensor.view(-1)[[9, 8]]
    assert tensor_digest(tensor) != tensor_digest(swapped)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_of_many_elements_show(dtype, shape):
    tensor = torch.randint(1, 256, shape).to(dtype)
    half, head = tensor.clone(), tensor.clone()
    half[: len(half) // 2] *= -1
    head[..., :16] *= -1
    assert len({tensor_digest(each) for each in (tensor, -tensor, half, head)}) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_one_value_differ(dtype):
    tensors = [torch.full((512, 1024), value).to(dtype) for value in (0, 1, 2, -1)]
    assert len({tensor_digest(tensor) for tensor in tensors}) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_in_another_order_shows(dtype):
    matrix = torch.randint(1, 256, (256, 1024)).to(dtype)
    heads = matrix.view(256, 8, 128)
    orders = [
        matrix,
        matrix.t(),
        matrix.flip(0),
        matrix.flip(1),
        matrix.roll(1, 0),
        matrix.roll(1, 1),
        heads.flip(1),
        heads[:, [1, 0, *range(2, 8)]],
        matrix[torch.randperm(256)],
        matrix[:, torch.randperm(1024)],
    ]
    assert len({tensor_digest(each) for each in orders}) == len(orders)


def test_length_counts():
    sizes = [*range(5), *(count * ROW_WORDS + more for count in range(4, 9) for more in range(6))]
    assert len({tensor_digest(torch.zeros(size)) for size in sizes}) == len(sizes)


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
