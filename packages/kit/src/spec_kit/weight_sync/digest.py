"""Compute a digest of a tensor's bytes that is the same on every device.

The digest detects damage, not forgery, since the connection is authenticated. The bytes are read as rows of an odd
number of 64-bit words. ``torch.hash_tensor`` hashes each row and each column on the tensor's device. SHA-256 hashes
the number of bytes, all these hashes, and the bytes after the last full row. torch's hash is the exclusive or, so

- a changed word changes the hash of its row; the same change of all words, such as flipped signs, does too, because
  a row has an odd number of words;
- two swapped words of one row change the hashes of their columns; swapped rows change the SHA-256.

A vendor's torch extension may lack ``torch.hash_tensor``, or fail long after the call. Bytes on its devices
are copied to the host first.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from spec_core.weight_manifest import TensorEntry, entries_digest

ROW_WORDS = 1023
"""Number of 64-bit words of a row, which must be odd."""
ROW_BYTES = 8 * ROW_WORDS


class TensorDigests:
    """Computes digests of several tensors, and waits for each device only once, in ``entries``."""

    def __init__(self) -> None:
        """Start without tensors."""
        self._tensors: list[tuple[torch.device, TensorEntry]] = []
        """Device and manifest entry of each tensor; the entry's digest is still empty."""
        self._hashes: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        """Device -> for each of its tensors, the bytes to be hashed by SHA-256."""

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Queue the hashing of tensors; work queued afterwards on the same stream may overwrite them."""
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
        """Return the manifest entry of each tensor, in the order in which they were added."""
        on_host = {device: iter(_on_host(hashes)) for device, hashes in self._hashes.items()}
        return [
            entry.model_copy(update={"digest": _hexadecimal(entry.num_bytes, next(on_host[device]))})
            for device, entry in self._tensors
        ]


def _hashes(tensor: Tensor) -> Tensor:
    """Return a uint8 copy of the hashes of all rows and columns, and of the bytes after the last full row."""
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
    """Copy the hashes of all tensors to the host, in one copy, and return the bytes of each tensor."""
    parts = torch.cat(hashes).cpu().split([len(part) for part in hashes])
    return [part.numpy().data for part in parts]


def _hexadecimal(num_bytes: int, hashes: memoryview) -> str:
    digest = hashlib.sha256(num_bytes.to_bytes(8, "little"))
    digest.update(hashes)
    return digest.hexdigest()[:32]


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, 32 hexadecimal digits, without its name, shape and dtype."""
    return tensor_entry("", tensor).digest


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Return the manifest entry of a tensor."""
    return tensor_entries([(name, tensor)])[0]


def tensor_entries(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Return the manifest entries of several tensors, in the order of the tensors."""
    digests = TensorDigests()
    digests.add(tensors)
    return digests.entries()


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype without the prefix ``torch.``, such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return one digest of several tensors with names, shapes and dtypes; their order does not matter.

    For the exported tensors of a draft it equals ``Manifest.digest``.
    """
    return entries_digest(tensor_entries(tensors))


def _computing_device(device: torch.device) -> torch.device:
    """Return ``device`` if torch itself supports it, or the CPU if a torch extension supports it."""
    is_torchs = torch.get_device_module(device).__name__.startswith("torch.")
    return device if is_torchs else torch.device("cpu")
