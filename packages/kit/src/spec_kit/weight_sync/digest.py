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
host, a block at a time. Torch reads and writes each byte a dozen times on the way; a backend may have a kernel that
reads it once (``DigestKernels``).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core.kernels import Kernel, KernelSet, no_kernel
from spec_core.weight_manifest import TensorEntry, entries_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from spec_core.backend import Backend

COLUMNS = 1 << 14
"""Words of a line."""
_LINE_BYTES = 8 * COLUMNS
_BLOCK_BYTES = 4 << 20
"""Bytes that plain torch works on at a time, a multiple of a line's; three times as much memory is needed."""
_DEVICE_BLOCK_BYTES = 64 << 20
"""The same on a device: in smaller blocks it would wait for the host, which asks for several kernels in each."""
_SEEDS = (0x9AE16A3B2F90404F, 0xC949C7DEFE7F8C1D)
_ROW_SEEDS = tuple(seed ^ 0xA0761D6478BD642F for seed in _SEEDS)
_LENGTH_SEED = 0xE7037ED1A0B428DB
_WORD_FACTOR = 0xD6E8FEB86659FD93
_GOLDEN = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def line_sums(tensors: Sequence[Tensor], factors: Tensor, word_factor: int) -> Tensor:
    """Return two sums over each line of m_i times the factor of the word's column, modulo 2**64, [2, lines].

    Each tensor begins a line, and its last one is filled up with zeros. ``factors`` is int64 [2, COLUMNS]; the sums
    are made where it lies.
    """
    sums = [factors.new_empty(2, 0)]
    for words in (words for tensor in tensors for words in _blocks(tensor, factors.device)):
        products = words * word_factor
        halves = products.view(torch.int32)  # the lower one of each word comes first
        halves[:, ::2] ^= halves[:, 1::2]
        sums.append((products * factors[:, None]).sum(dim=-1))
    return torch.cat(sums, dim=1)


def _blocks(tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Yield the lines of a tensor on ``device``, int64 [lines, COLUMNS], some at a time."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for part in raw.split(_BLOCK_BYTES if raw.is_cpu else _DEVICE_BLOCK_BYTES):
        count = -(-len(part) // _LINE_BYTES)
        is_whole = len(part) == count * _LINE_BYTES and part.storage_offset() % 8 == part.data_ptr() % 8 == 0
        if is_whole:
            block = part.to(device)
        else:
            block = torch.zeros(count * _LINE_BYTES, dtype=torch.uint8, device=device)
            block[: len(part)].copy_(part)
        yield block.view(torch.int64).view(count, COLUMNS)


@dataclass(frozen=True, kw_only=True)
class DigestKernels(KernelSet):
    """The kernel that digests can use."""

    line_sums: Kernel = line_sums

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return tensors of several lines, of a part of one, and of a part of a word."""
        shapes = [(3, 2 * COLUMNS), (2 * COLUMNS + 3,), (8,), ()]
        tensors = [draw(*shape).view(torch.int32) for shape in shapes]
        return {"line_sums": (tensors, _factors(_SEEDS, COLUMNS, tensors[0].device), _signed(_WORD_FACTOR))}


_kernels: dict[str, DigestKernels] = {}
"""Kernels for each type of device of which a backend was named."""


def use_digest_kernels(backend: Backend) -> None:
    """Digest with the kernel of this backend, if it has one, what lies on its devices from now on."""
    _kernels[backend.device_type] = DigestKernels.of(backend.kernel)


class TensorDigests:
    """Digests of several tensors; a device is waited for once, when all were added.

    A thread beside a busy engine waits for its turn again and again: tensors that are added by one call need few.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._tensors: list[tuple[torch.device, str, tuple[int, ...], str, int]] = []
        """Device, name, shape, dtype and bytes of each."""
        self._sums: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        """Those of the lines of the tensors on each device."""

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digest tensors; their memory may change after what is queued on their devices now."""
        groups: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        for name, tensor in tensors:
            groups[tensor.device].append(tensor)
            self._tensors.append(
                (tensor.device, name, tuple(tensor.shape), dtype_name(tensor), tensor.nbytes)
            )
        for device, group in groups.items():
            factors = _factors(_SEEDS, COLUMNS, _computing_device(device))
            kernels = _kernels.get(device.type) or DigestKernels.of(no_kernel)
            self._sums[device].append(kernels.line_sums(group, factors, _signed(_WORD_FACTOR)))

    def entries(self) -> list[TensorEntry]:
        """Return an entry for each tensor, in the order in which they were added."""
        totals = {
            device: iter(_totals(sums, [size for where, *_, size in self._tensors if where == device]))
            for device, sums in self._sums.items()
        }
        return [
            TensorEntry(
                name=name,
                shape=shape,
                dtype=dtype,
                num_bytes=num_bytes,
                digest=_hexadecimal(next(totals[device]), num_bytes),
            )
            for device, name, shape, dtype, num_bytes in self._tensors
        ]


def _totals(sums: Sequence[Tensor], sizes: Sequence[int]) -> list[list[int]]:
    """Return the sums of each tensor, one for each seed, from those of its lines; ``sizes`` are their bytes."""
    counts = torch.tensor([-(-size // _LINE_BYTES) for size in sizes])
    tensor_of_line = torch.arange(len(sizes)).repeat_interleave(counts)
    rows = torch.arange(len(tensor_of_line)) - (counts.cumsum(0) - counts)[tensor_of_line]
    host = torch.device("cpu")
    weighted = torch.cat(list(sums), dim=1).to(host) * _factors(_ROW_SEEDS, int(counts.max()), host)[:, rows]
    totals = torch.zeros(len(_SEEDS), len(sizes), dtype=torch.int64)
    return totals.index_add_(1, tensor_of_line, weighted).t().tolist()


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, 32 hexadecimal digits; the name, shape and dtype are not in it."""
    return tensor_entry("", tensor).digest


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Return what a manifest says of a tensor."""
    return tensor_entries([(name, tensor)])[0]


def tensor_entries(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Return what a manifest says of several tensors, in their order."""
    digests = TensorDigests()
    digests.add(tensors)
    return digests.entries()


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of a tensor's dtype, such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return one digest of several tensors and their names, shapes and dtypes, whatever their order.

    For the tensors that a draft exports it is their ``Manifest.digest``.
    """
    return entries_digest(tensor_entries(tensors))


def _hexadecimal(totals: Iterable[int], num_bytes: int) -> str:
    return "".join(
        f"{(total + factor * num_bytes) % _MODULUS:016x}"
        for total, factor in zip(totals, _length_factors(), strict=True)
    )


def _computing_device(device: torch.device) -> torch.device:
    """Return ``device`` where torch itself has the kernels, else the CPU."""
    is_torchs = torch.get_device_module(device).__name__.startswith("torch.")
    return device if is_torchs else torch.device("cpu")


def _factors(seeds: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Return the first ``count`` odd numbers of each seed; the beginning of tables that are kept."""
    return _tables(seeds, max(COLUMNS, 1 << (count - 1).bit_length()), device)[:, :count]


@functools.cache
def _tables(seeds: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    return torch.stack([_odd(seed, count) for seed in seeds]).to(device)


@functools.cache
def _length_factors() -> list[int]:
    return [int(_odd(seed ^ _LENGTH_SEED, 1)) for seed in _SEEDS]


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
