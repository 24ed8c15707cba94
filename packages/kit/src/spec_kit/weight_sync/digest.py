"""Digest of a tensor's bytes, the same wherever they lie.

It finds damage, not forgery: the connection is authenticated. The bytes are read as rows of an odd number of words of
64 bits. ``torch.hash_tensor`` hashes each row and each column where the tensor lies; SHA-256 hashes their number of
bytes, all these hashes, and the bytes that fill no row. torch's hash is the exclusive or, so

- a changed word shows in its row, and one change of all words, as of each sign, too: a row has an odd number of them;
- two words that change places show in their columns where they are in one row, and rows are hashed in their order.

A vendor's extension may lack ``torch.hash_tensor``, or fail long after it was called: from there the bytes are copied
to the host.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from spec_core.weight_manifest import TensorEntry, entries_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

ROW_WORDS = 1023
"""Words of a row: an odd number."""
ROW_BYTES = 8 * ROW_WORDS


class TensorDigests:
    """Digests of several tensors; a device is waited for once, when all were added."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._tensors: list[tuple[torch.device, TensorEntry]] = []
        """Device and entry of each, whose digest is still empty."""
        self._hashes: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        """Bytes that stand for each tensor on a device."""

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digest tensors; their memory may change after what is queued on their devices now."""
        for name, tensor in tensors:
            hashes = _hashes(tensor.detach().to(_computing_device(tensor.device)))
            entry = TensorEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor),
                num_bytes=tensor.nbytes,
                digest="",
            )
            self._tensors.append((hashes.device, entry))
            self._hashes[hashes.device].append(hashes)

    def entries(self) -> list[TensorEntry]:
        """Return an entry for each tensor, in the order in which they were added."""
        on_host = {device: iter(_on_host(hashes)) for device, hashes in self._hashes.items()}
        return [
            entry.model_copy(update={"digest": _hexadecimal(entry.num_bytes, next(on_host[device]))})
            for device, entry in self._tensors
        ]


def _hashes(tensor: Tensor) -> Tensor:
    """Return the hashes of all rows and of all columns, and the bytes that fill no row, uint8; a copy."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    end = len(raw) - len(raw) % ROW_BYTES
    if not end:
        return raw.clone()
    if raw.storage_offset() % 8 or raw.data_ptr() % 8:
        raw = raw.clone()
    words = raw[:end].view(torch.int64).view(-1, ROW_WORDS)
    rows, columns = (torch.hash_tensor(words, dim=dim).view(torch.uint8) for dim in (1, 0))
    return torch.cat([rows, columns, raw[end:]])


def _on_host(hashes: list[Tensor]) -> list[memoryview]:
    """Return what stands for each tensor, copied from its device at once."""
    parts = torch.cat(hashes).cpu().split([len(part) for part in hashes])
    return [part.numpy().data for part in parts]


def _hexadecimal(num_bytes: int, hashes: memoryview) -> str:
    digest = hashlib.sha256(num_bytes.to_bytes(8, "little"))
    digest.update(hashes)
    return digest.hexdigest()[:32]


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


def _computing_device(device: torch.device) -> torch.device:
    """Return ``device`` where torch itself has the kernels, else the CPU."""
    is_torchs = torch.get_device_module(device).__name__.startswith("torch.")
    return device if is_torchs else torch.device("cpu")
