"""FileTransport writes each version of the weights into a shared folder.

A version appears atomically and never changes. After a crash of the publisher, ``newest`` reads the newest
version in the folder, if the folder still exists. A publisher locks an unfinished version while its process
lives. The next publisher removes unfinished versions that are not locked.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import pydantic

from spec_core import (
    Manifest,
    WeightMedium,
    WeightReceiver,
    WeightSender,
    WeightTransport,
    WeightTransportConfig,
    foreign_errors,
)
from spec_core.errors import ArtifactError, DeadlineExceeded, PeerLost, RunError
from spec_kit.sharding import SafetensorsFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from spec_core import Backend

_TENSORS, _MANIFEST = "model.safetensors", "manifest.json"
_VERSION = re.compile(r"v(\d+)-[0-9a-f]{8}")
_HIDDEN = ".unfinished-"
_OWN = "draft-weights-"


class FileConfig(WeightTransportConfig):
    """Options of the weight transport ``file``."""

    folder: Path | None = None
    """Folder of the versions, which every rank sees under the same path. If it is None, a temporary folder is created
    on this host, and removed when this process ends."""
    keep: int = pydantic.Field(2, ge=1)
    """Number of newest versions that are stored; older versions are removed."""


class FileTransport(WeightTransport):
    """The weight transport ``file``: the publisher writes files, and ranks read them."""

    name: ClassVar[str] = "file"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[WeightTransportConfig]] = FileConfig

    def __init__(self, config: WeightTransportConfig, backend: Backend) -> None:
        """Store the options. No folder is created before the first update."""
        super().__init__(config, backend)
        self._options = cast("FileConfig", config)
        self._writing = threading.Lock()
        self._own: Path | None = None
        self._remove_own: Callable[[], object] = lambda: None

    def location(self, device: torch.device) -> str:
        """Return an empty string, since only reading shows whether a rank sees the folder."""
        return ""

    def obstacle(self, location: str, device: torch.device) -> str:
        """Return an empty string: any rank may see the folder."""
        return ""

    def medium(self, location: str, device: torch.device) -> WeightMedium:
        """Return the medium for files."""
        return WeightMedium.FILES

    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        """Return a receiver that reads the version's files; its tensors are on the CPU."""
        return _FileReceiver()

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        """Return a sender that writes the version, unless it already exists."""
        return _FileSender(self, manifest, weights, len(receivers))

    def close(self) -> None:
        """Remove the folder if this process created it as a temporary folder."""
        with self._writing:
            self._own = None
            self._remove_own()

    def write(self, manifest: Manifest, weights: Mapping[str, Tensor], check: Callable[[], None]) -> Path:
        """Write a version completely and return its folder.

        ``check`` is called repeatedly, and may raise an error to stop the write.
        """
        with self._writing, foreign_errors(RunError, f"version {manifest.version} cannot be written"):
            folder = self._folder()
            final = folder / f"v{manifest.version}-{manifest.digest[:8]}"
            if not final.exists():
                _write_whole(final, manifest, weights, check)
            _remove_old(folder, self._options.keep, final)
            return final

    def _folder(self) -> Path:
        if (folder := self._options.folder) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder.resolve()
        if self._own is None:
            self._own, lock = _locked_folder(_OWN, Path(tempfile.gettempdir()))
            self._remove_own = weakref.finalize(self, _remove, self._own, lock)
        return self._own


class _FileReceiver(WeightReceiver):
    """Reads the tensors of a version, one after the other."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def receive(self, sender: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
        folder = SafetensorsFolder(Path(sender))
        with folder.open_tensors(_TENSORS) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                _check(self._closed, deadline)
                yield name, tensors.get_tensor(name)

    def close(self) -> None:
        self._closed.set()


class _FileSender(WeightSender):
    """Writes the version in ``open``; ranks read it when they get its folder's name."""

    def __init__(
        self, transport: FileTransport, manifest: Manifest, weights: Mapping[str, Tensor], num_ranks: int
    ) -> None:
        self._transport = transport
        self._manifest = manifest
        self._weights = weights
        self._num_ranks = num_ranks
        self._closed = threading.Event()

    def open(self, deadline: float) -> Sequence[str]:
        path = self._transport.write(self._manifest, self._weights, lambda: _check(self._closed, deadline))
        return [str(path)] * self._num_ranks

    def send(self, deadline: float) -> None:
        pass

    def close(self) -> None:
        self._closed.set()


def newest(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Return the newest version in a folder. Raise ArtifactError if there is none or it is damaged."""
    from spec_kit.weight_sync import tensors_digest

    versions = _versions(folder)
    if not versions:
        raise ArtifactError(f"{folder} holds no version of a draft")
    state = SafetensorsFolder(versions[-1])
    with foreign_errors(ArtifactError, f"{versions[-1] / _MANIFEST} is no manifest"):
        manifest = Manifest.decode(state.read_bytes(_MANIFEST))
    weights = state.read_tensors(_TENSORS)
    if (found := tensors_digest(weights.items())) != manifest.digest:
        raise ArtifactError(f"{versions[-1]} has digest {found}, its manifest says {manifest.digest}")
    return manifest, weights


def _write_whole(
    final: Path, manifest: Manifest, weights: Mapping[str, Tensor], check: Callable[[], None]
) -> None:
    """Write a version under a hidden name, fsync it, and rename it to ``final``."""
    hidden, lock = _locked_folder(_HIDDEN, final.parent)
    try:
        hidden.chmod(0o755)
        state = SafetensorsFolder(hidden)
        state.write_tensors(_TENSORS, weights, check)
        state.write_json(_MANIFEST, manifest.model_dump(mode="json"))
        _sync(hidden)
        hidden.rename(final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """Create a locked folder; return it and the descriptor that holds the lock.

    Remove older folders with this prefix that no process has locked.
    """
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError), _opened(left) as descriptor:  # without working locks, all folders stay
            if _take(descriptor):
                shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError), _opened(folder) as descriptor:
            is_ours = True
            with suppress(OSError):
                is_ours = _take(descriptor)
            if is_ours and folder.exists():  # else another process has removed it as unlocked
                return folder, os.dup(descriptor)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextmanager
def _opened(folder: Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take(folder: int) -> bool:
    """Lock a folder until its last descriptor is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_old(folder: Path, keep: int, current: Path) -> None:
    """Remove old versions except the ``keep`` newest and ``current``.

    A rank that reads a removed version can finish, because its file is open.
    """
    for version in _versions(folder)[:-keep]:
        if version != current:
            shutil.rmtree(version, ignore_errors=True)


def _versions(folder: Path) -> list[Path]:
    """Return the folders of the versions in a folder, the newest last."""
    found = {path: match for path in folder.glob("v*") if (match := _VERSION.fullmatch(path.name))}
    return sorted(found, key=lambda path: int(found[path][1]))


def _check(closed: threading.Event, deadline: float) -> None:
    if closed.is_set():
        raise PeerLost("this end of the update was closed")
    if time.monotonic() >= deadline:
        raise DeadlineExceeded("the update was not over at its deadline")


def _sync(folder: Path) -> None:
    with _opened(folder) as descriptor:
        os.fsync(descriptor)
