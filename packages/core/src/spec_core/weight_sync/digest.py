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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core.kernels import Kernel, KernelSet, no_kernel
from spec_core.weight_manifest import TensorEntry, entries_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from spec_core.backend import Backend

COLUMNS = 1 << 14
"""Words of a line."""
_LINE_BYTES = 8 * COLUMNS
_BLOCK_BYTES = 4 << 20
"""Bytes that are worked on at a time, a multiple of a line's; three times as much memory is needed."""
_DEVICE_BLOCK_BYTES = 64 << 20
"""The same on a device: in smaller blocks it would wait for the host, which asks for several kernels in each."""
_SEEDS = (0x9AE16A3B2F90404F, 0xC949C7DEFE7F8C1D)
_ROW_SEEDS = tuple(seed ^ 0xA0761D6478BD642F for seed in _SEEDS)
_LENGTH_SEED = 0xE7037ED1A0B428DB
_WORD_FACTOR = 0xD6E8FEB86659FD93
_GOLDEN = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def line_sums(words: Tensor, factors: Tensor, word_factor: int) -> Tensor:
    """Return two sums over each line of m_i times the factor of the word's column, modulo 2**64, [2, lines].

    ``words`` is int64 [lines, COLUMNS], ``factors`` int64 [2, COLUMNS].
    """
    products = words * word_factor
    halves = products.view(torch.int32)  # the lower one of each word comes first
    halves[:, ::2] ^= halves[:, 1::2]
    return (products * factors[:, None]).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class DigestKernels(KernelSet):
    """The kernel that digests can use."""

    line_sums: Kernel = line_sums

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return lines of random words."""
        words = draw(3, 2 * COLUMNS).view(torch.int64)
        return {"line_sums": (words, _factors(_SEEDS, COLUMNS, words.device), _signed(_WORD_FACTOR))}


_kernels: dict[str, DigestKernels] = {}
"""Kernels for each type of device of which a backend was named."""


def use_digest_kernels(backend: Backend) -> None:
    """Digest with the kernel of this backend, if it has one, what lies on its devices from now on."""
    _kernels[backend.device_type] = DigestKernels.of(backend.kernel)


class TensorDigests:
    """Digests of several tensors; a device is waited for once, when all were added."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._lines: dict[torch.device, _LineSums] = {}
        self._tensors: list[tuple[str, tuple[int, ...], str, int, torch.device, int]] = []
        """Name, shape, dtype and bytes of each, the device of its lines, and its number among those there."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest a tensor; its memory may change after what is queued on its device now."""
        device = _computing_device(tensor.device)
        if (lines := self._lines.get(device)) is None:
            lines = self._lines[device] = _LineSums(device)
        number = lines.add(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        shape, dtype = tuple(tensor.shape), dtype_name(tensor)
        self._tensors.append((name, shape, dtype, tensor.nbytes, device, number))

    def entries(self) -> list[TensorEntry]:
        """Return an entry for each tensor, in the order in which they were added."""
        totals = {device: lines.totals() for device, lines in self._lines.items()}
        return [
            TensorEntry(
                name=name,
                shape=shape,
                dtype=dtype,
                num_bytes=num_bytes,
                digest=_hexadecimal(totals[device][number], num_bytes),
            )
            for name, shape, dtype, num_bytes, device, number in self._tensors
        ]


@dataclass(frozen=True)
class _Lines:
    """Lines of one tensor that lie one behind the other."""

    tensor: int
    first: int
    count: int


class _LineSums:
    """Sums over each line of tensors, some lines at a time.

    Whole lines are summed where they lie. Ends and small tensors are copied into a block that many share, and so is
    what lies elsewhere: a thread that asks a device for much has to wait for its turn after every call.
    """

    def __init__(self, device: torch.device) -> None:
        block_bytes = _BLOCK_BYTES if torch.empty(0, device=device).is_cpu else _DEVICE_BLOCK_BYTES
        self._block = torch.empty(block_bytes, dtype=torch.uint8, device=device)
        self._factors = _factors(_SEEDS, COLUMNS, device)
        self._line_sums = (_kernels.get(device.type) or DigestKernels.of(no_kernel)).line_sums
        self._num_tensors = self._used = 0
        self._in_block: list[_Lines] = []
        self._summed: list[_Lines] = []
        self._sums: list[Tensor] = []
        """Those of ``_summed``, in that order."""

    def add(self, raw: Tensor) -> int:
        """Add a tensor's bytes; return its number."""
        number, first = self._num_tensors, 0
        self._num_tensors += 1
        if raw.device == self._block.device and raw.storage_offset() % 8 == raw.data_ptr() % 8 == 0:
            whole = raw[: raw.numel() // _LINE_BYTES * _LINE_BYTES]
            for part in whole.split(len(self._block)):
                first += self._sum_up(part, [_Lines(number, first, len(part) // _LINE_BYTES)])
        start = first * _LINE_BYTES
        while start < raw.numel():
            if self._used == len(self._block):
                self._empty_block()
            end = min(raw.numel(), start + len(self._block) - self._used)
            free = self._block[self._used :]
            free[: end - start].copy_(raw[start:end])
            count = -(-(end - start) // _LINE_BYTES)
            free[end - start : count * _LINE_BYTES].zero_()
            self._in_block.append(_Lines(number, first, count))
            self._used, first, start = self._used + count * _LINE_BYTES, first + count, end
        return number

    def totals(self) -> list[list[int]]:
        """Return the sums of each tensor, one for each seed."""
        self._empty_block()
        host = torch.device("cpu")
        totals = torch.zeros(len(_SEEDS), self._num_tensors, dtype=torch.int64)
        if self._sums:
            rows = _factors(_ROW_SEEDS, max(lines.first + lines.count for lines in self._summed), host)
            of_lines = [rows[:, lines.first : lines.first + lines.count] for lines in self._summed]
            tensors = torch.tensor([lines.tensor for lines in self._summed])
            counts = torch.tensor([lines.count for lines in self._summed])
            weighted = torch.cat(self._sums, dim=1).to(host) * torch.cat(of_lines, dim=1)
            totals.index_add_(1, tensors.repeat_interleave(counts), weighted)
        return totals.t().tolist()

    def _empty_block(self) -> None:
        self._sum_up(self._block[: self._used], self._in_block)
        self._used, self._in_block = 0, []

    def _sum_up(self, raw: Tensor, lines: Sequence[_Lines]) -> int:
        """Sum up whole lines, which are those of ``lines``; return their number."""
        words = raw.view(torch.int64).view(-1, COLUMNS)
        if len(words):
            self._sums.append(self._line_sums(words, self._factors, _signed(_WORD_FACTOR)))
            self._summed += lines
        return len(words)


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, 32 hexadecimal digits; the name, shape and dtype are not in it."""
    return tensor_entry("", tensor).digest


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Return what a manifest says of a tensor."""
    return tensor_entries([(name, tensor)])[0]


def tensor_entries(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Return what a manifest says of several tensors, in their order."""
    digests = TensorDigests()
    for name, tensor in tensors:
        digests.add(name, tensor)
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
