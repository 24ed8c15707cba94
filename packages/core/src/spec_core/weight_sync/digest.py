"""Digest of a tensor's bytes, the same wherever they lie.

It finds damage, not forgery: the connection is authenticated. Let w_i be the bytes as little-endian words of 64 bits,
the last one filled with zeros, p_i = w_i * c modulo 2**64 for an odd c, and m_i = p_i xor (p_i >> 32). A digest is
two sums over i of m_i * odd(i), modulo 2**64, to which the number of bytes is added, multiplied by an odd number of
its own. So

- a change of one word always shows: its m changes, and an odd factor loses nothing;
- two words that change places show, since their factors differ. Two odd factors differ by an even number, though,
  which loses highest bits; and where these change in an even number of words, as by the sign of a whole tensor, the
  sum of odd factors loses them too. So ``c`` carries a word's lower half up, ``xor`` brings the upper half down.

odd(i) is the product of two odd numbers, of the word's row and of its column in lines of 2**14 words: two small
tables do for tensors of any size. Both come from splitmix64 (Steele et al., 2014).

It is computed where the tensor lies if torch's own kernels are used there. A vendor's extension may lack products,
shifts or sums of 64-bit integers, or fail long after they were asked for: from there the bytes are copied to the
host, a block at a time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from spec_core.weight_manifest import TensorEntry, entries_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

COLUMNS = 1 << 14
"""Words of a line."""
_BLOCK_BYTES = 8 << 20
"""Bytes that are worked on at a time; three times as much memory is needed beside the tensor."""
_DEVICE_BLOCK_BYTES = 32 << 20
"""The same on a device: in smaller blocks it would wait for the host, which asks for a dozen kernels in each."""
_SEEDS = (0x9AE16A3B2F90404F, 0xC949C7DEFE7F8C1D)
_ROW_SEED, _LENGTH_SEED = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB
_WORD_FACTOR = 0xD6E8FEB86659FD93
_GOLDEN = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, 32 hexadecimal digits; the name, shape and dtype are not in it."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    lengths = [int(_odd(seed ^ _LENGTH_SEED, 1)) * raw.numel() for seed in _SEEDS]
    return "".join(
        f"{(total + length) % _MODULUS:016x}"
        for total, length in zip(_weighted_sums(raw), lengths, strict=True)
    )


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Return what a manifest says of a tensor."""
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor),
        num_bytes=tensor.nbytes,
        digest=tensor_digest(tensor),
    )


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of a tensor's dtype, such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return one digest of several tensors and their names, shapes and dtypes, whatever their order.

    For the tensors that a draft exports it is their ``Manifest.digest``.
    """
    return entries_digest(tensor_entry(name, tensor) for name, tensor in tensors)


def _weighted_sums(raw: Tensor) -> list[int]:
    device = _computing_device(raw.device)
    num_rows = -(-raw.numel() // (COLUMNS * 8))
    factors = [
        (_factors(seed, COLUMNS, device), _factors(seed ^ _ROW_SEED, num_rows, device)) for seed in _SEEDS
    ]
    sums = torch.zeros(len(_SEEDS), dtype=torch.int64, device=device)
    block_bytes = _BLOCK_BYTES if sums.is_cpu else _DEVICE_BLOCK_BYTES
    for start in range(0, raw.numel(), block_bytes):
        mixed = _mixed(_words(raw[start : start + block_bytes].to(device)))
        first = start // (COLUMNS * 8)
        for index, (column, row) in enumerate(factors):
            sums[index] += ((mixed * column).sum(dim=1) * row[first : first + len(mixed)]).sum()
    return sums.tolist()


def _computing_device(device: torch.device) -> torch.device:
    """Return ``device`` where torch itself has the kernels, else the CPU."""
    is_torchs = torch.get_device_module(device).__name__.startswith("torch.")
    return device if is_torchs else torch.device("cpu")


def _words(raw: Tensor) -> Tensor:
    """Return bytes as int64 [rows, COLUMNS], filled with zeros."""
    missing = -raw.numel() % (COLUMNS * 8)
    if missing:
        raw = torch.nn.functional.pad(raw, (0, missing))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64).view(-1, COLUMNS)


def _mixed(words: Tensor) -> Tensor:
    """Return m of each word."""
    products = words * _signed(_WORD_FACTOR)
    halves = products.view(torch.int32)  # the lower one of each word comes first
    halves[:, ::2] ^= halves[:, 1::2]
    return products


def _factors(seed: int, count: int, device: torch.device) -> Tensor:
    """Return the first ``count`` odd numbers of a seed; the beginning of a table that is kept."""
    return _table(seed, max(COLUMNS, 1 << (count - 1).bit_length()), device)[:count]


@functools.cache
def _table(seed: int, count: int, device: torch.device) -> Tensor:
    return _odd(seed, count).to(device)


def _odd(seed: int, count: int) -> Tensor:
    """Return the first numbers of splitmix64's sequence, made odd, as int64: the highest bit is the sign."""
    x = torch.arange(1, count + 1) * _signed(_GOLDEN) + _signed(seed)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, as an unsigned number's shift does."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _MODULUS if word >> 63 else word
