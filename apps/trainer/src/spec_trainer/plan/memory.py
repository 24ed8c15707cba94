"""Compare the memory and disk space that a run needs at least with the free memory and space.

The needed memory includes weights, gradients, optimizer state, frozen tensors, features in flight and
checkpoints. It excludes activations for the backward pass and an engine's KV cache, because they depend on
code that has not run.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from spec_core import WeightShape
from spec_core.errors import ConfigError
from spec_core.wording import counted
from spec_kit.targets import stored_tensors
from spec_trainer.plan.host_memory import free_host_bytes
from spec_trainer.plan.image_memory import image_bytes
from spec_trainer.run.dispatch import sample_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spec_core import ShardCounts
    from spec_kit.targets import StoredTensor
    from spec_trainer.plan.image_memory import ImageBytes
    from spec_trainer.run.members import Member
    from spec_trainer.run.spec import RunSpec

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8_BYTES = 2
"""Bytes of a weight in fp8: one in each of two copies, for the forward and the backward pass."""
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
"""Safetensors' name of a dtype -> bytes of an element; any other dtype counts as one byte."""
_CAST = ("F64", "F32", "F16", "BF16")
"""Stored dtypes that an engine casts to its compute dtype; other dtypes are quantised weights, which it keeps."""
TRAINING = "weights, gradients and optimizer state of the draft"
_SMALLER_DRAFT = "choose a smaller draft (section draft)"
_PROCESS_BYTES = 200 << 20
"""Host memory of a process that has imported torch."""


@dataclass(frozen=True)
class MemoryPart:
    """One item of the memory that a run needs, such as the target's weights."""

    what: str
    num_bytes: int
    remedy: str
    """Advice to make the part smaller; it ends an error message."""


@dataclass(frozen=True)
class MemoryPool:
    """The free memory of a device or host, or the free space of a disk, and what a run needs of it."""

    name: str
    """Name that begins an error message, such as "this host's memory"."""
    free_bytes: int
    parts: Sequence[MemoryPart]

    @property
    def least_bytes(self) -> int:
        """Return the least number of bytes that the run needs: the sum of the bytes of ``parts``."""
        return sum(part.num_bytes for part in self.parts)

    def check(self) -> None:
        """Raise ConfigError if the sum of the parts exceeds the free bytes."""
        if self.least_bytes <= self.free_bytes:
            return
        biggest = max(self.parts, key=lambda part: part.num_bytes)
        raise ConfigError(
            f"{self.name} does not hold the run: it takes {shown_size(self.least_bytes)} at least, "
            f"{shown_size(self.free_bytes)} are free; the biggest part is {biggest.what} "
            f"({shown_size(biggest.num_bytes)}): {biggest.remedy}"
        )

    def document(self) -> dict[str, Any]:
        """Return free bytes, needed bytes and bytes of each part, as a JSON-serializable dict."""
        parts = {part.what: part.num_bytes for part in self.parts}
        return {"free_bytes": self.free_bytes, "least_bytes": self.least_bytes, "parts": parts}


class RunSizes:
    """Sizes in bytes of a run's weights, states and features; no weight is loaded."""

    def __init__(self, run: RunSpec) -> None:
        """Compute the sizes of ``run``; torch is not imported."""
        self._run = run
        self._config = run.config

    @cached_property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of each trained weight; empty if the draft's plugin does not declare its weights."""
        return self._run.draft_cost.weight_shapes

    @cached_property
    def num_trained(self) -> int:
        """The number of trained parameters."""
        return sum(map(prod, self.weights.values()))

    @cached_property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state, over all ranks."""
        run = self._run
        hints = run.draft.shard_hints(run.target)
        return sum(
            run.optimizer.state_bytes(
                WeightShape(name=name, shape=shape, is_vocabulary=hints.is_vocabulary(name))
            )
            for name, shape in self.weights.items()
        )

    @cached_property
    def target_bytes(self) -> int:
        """Bytes of the target's weights in one engine, its image encoder included."""
        return self._loaded(stored_tensors(self._run.target.folder))

    @cached_property
    def images(self) -> ImageBytes | None:
        """Bytes that one engine needs for images; None if the target has no image encoder."""
        return image_bytes(self._run, self._itemsize or _ITEMSIZES[self._run.target.dtype])

    @cached_property
    def encoder_bytes(self) -> int:
        """Bytes of the weights of the target's image encoder in one engine; 0 if it has none."""
        return 0 if self.images is None else self._loaded(self.images.encoder)

    def _loaded(self, tensors: Mapping[str, StoredTensor]) -> int:
        """Return the number of bytes of stored tensors after an engine has loaded them."""
        cast = self._itemsize
        return sum(
            prod(stored.shape) * (cast if cast and stored.dtype in _CAST else _STORED.get(stored.dtype, 1))
            for stored in tensors.values()
        )

    @property
    def _itemsize(self) -> int | None:
        """Bytes of a value in the engine's dtype; None if it computes in the stored dtype, as with ``auto``."""
        return _ITEMSIZES.get(getattr(self._config.engine, "dtype", None) or "auto")

    @cached_property
    def frozen_bytes(self) -> int:
        """Bytes of the target's embedding and head in a trainer, with their copies in fp8."""
        target = self._run.target
        train = self._config.train
        numbers = target.vocab_size * target.hidden_size
        copies = _FP8_BYTES if train.fp8 is not None else 0
        return numbers * (_ITEMSIZES[train.dtype] * (1 if target.tied else 2) + copies)

    @cached_property
    def window_bytes(self) -> int:
        """Largest number of bytes of features in flight to one rank.

        It is the size of the window, or of all features of the run if they are less.
        """
        run = self._run
        if self._config.data.features is not None:
            return 0
        if self._config.decode.every:
            return run.window_bytes
        return min(run.window_bytes, sample_bytes(run.schema, sum(run.dataset.lengths.values())))

    @cached_property
    def shards(self) -> ShardCounts:
        """Numbers of ranks over which the draft's weights and the target's vocabulary are sharded."""
        return self._run.strategy_type.shard_counts(self._config.strategy, self._config.train.ranks)

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint, which has float32 weights and the optimizer's state."""
        return 4 * self.num_trained + self.optimizer_bytes

    @property
    def training_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state of one copy of the draft.

        If the weights are not sharded and the draft computes in bfloat16, their bfloat16 copy is included.
        """
        cast = self._config.train.dtype == "bfloat16" and self.shards.weights == 1
        fp8 = _FP8_BYTES * self.shards.weights if self._config.train.fp8 == "layers" else 0
        return self.state_bytes + (4 + 2 * cast + fp8) * self.num_trained


def rooms(run: RunSpec, sizes: RunSizes) -> list[MemoryPool]:
    """Return the devices, host memory and disk that the run uses on this host, each with the run's needs."""
    return [*_devices(run, sizes), *_host(run, sizes), _disk(run, sizes)]


def _devices(run: RunSpec, sizes: RunSizes) -> Iterator[MemoryPool]:
    capabilities = run.backend.capabilities()
    if capabilities.device_bytes is None:
        return
    if not run.members():
        free = capabilities.device_bytes - capabilities.process_bytes
        engine = _engine_parts(run, sizes) if run.config.data.features is None else []
        yield MemoryPool("the device", free, [*engine, *rank_parts(run, sizes), _window(sizes, 1)])
    for member in run.members():
        parts = _engine_parts(run, sizes) if member.role == "engine" else rank_parts(run, sizes)
        yield MemoryPool(
            f"{member.name}'s part of a device", _limit(member, capabilities.device_bytes), parts
        )


def _limit(member: Member, device_bytes: int) -> int:
    if member.memory_fraction is not None:
        return int(member.memory_fraction * device_bytes)
    return device_bytes - member.uncounted_bytes


def _host(run: RunSpec, sizes: RunSizes) -> Iterator[MemoryPool]:
    config = run.config
    capabilities = run.backend.capabilities()
    here = [member for member in run.members() if not member.host]
    if run.members() and not here:
        return  # the run is on other hosts, whose memory is unknown here
    engines = sum(member.role == "engine" for member in here) or int(
        not run.members() and config.data.features is None
    )
    ranks = sum(member.role == "trainer" for member in here) or int(not run.members())
    parts = [
        MemoryPart(
            f"{counted(max(1, len(here)), 'process', 'processes')} with libraries",
            max(1, len(here)) * _PROCESS_BYTES,
            "lower engine.replicas or train.ranks",
        )
    ]
    if not capabilities.device_ipc and (run.members() or capabilities.device_bytes is None):
        parts.append(_window(sizes, ranks))
    if capabilities.device_bytes is not None:
        saved = 4 * sizes.num_trained
        parts.append(MemoryPart("the draft's weights while they are saved", saved, _SMALLER_DRAFT))
    else:
        parts += _engine_parts(run, sizes, engines)
        state = sizes.training_bytes * ranks // sizes.shards.weights
        parts.append(MemoryPart(TRAINING, state, _SMALLER_DRAFT))
    yield MemoryPool("this host's memory", free_host_bytes(), parts)


def _engine_parts(run: RunSpec, sizes: RunSizes, engines: int | None = None) -> list[MemoryPart]:
    """Return the parts of the engines' memory.

    If ``engines`` is None, it is the memory of one engine on one device; otherwise the host memory of so many
    engines.
    """
    config = run.config.engine
    own = run.engine_type
    wide = getattr(config, "dtype", None) == "float32" and run.target.dtype != "float32"
    if wide:
        remedy = f"set engine.dtype={run.target.dtype}, or choose a smaller target"
    elif engines is not None and engines > 1:
        remedy = "lower engine.replicas"
    elif engines is None and not own.abilities.in_process:
        remedy = "raise engine.tensor_parallel or placement.engine_fraction, or choose a smaller target"
    else:
        remedy = "choose a smaller target (target)"
    where = "" if engines is None else f" in {counted(engines, 'engine')}"
    copies = engines or 1
    ranks = config.tensor_parallel if engines is None else 1
    weights = (sizes.target_bytes - sizes.encoder_bytes) // ranks * copies
    parts = [MemoryPart(f"the target's weights{where}", weights, remedy)]
    if (images := sizes.images) is None:
        return parts
    parts.append(
        MemoryPart(f"the image encoder's weights{where}", sizes.encoder_bytes // ranks * copies, remedy)
    )
    scale = "scale images down in the target's image processor, or give smaller ones"
    parts.append(MemoryPart(f"the image encoder's activations{where}", images.activations * copies, scale))
    parts.append(MemoryPart(f"pixels of images{where}", images.pixels * copies, scale))
    return [part for part in parts if part.num_bytes]


def rank_parts(run: RunSpec, sizes: RunSizes) -> list[MemoryPart]:
    """Return the parts of a trainer rank's device memory, without activations and features in flight."""
    config = run.config
    tokens = ceil(config.train.global_batch_tokens / run.schedule.num_shares / config.train.accumulation)
    tokens = min(tokens, run.source.total_tokens)
    parts = [
        MemoryPart(
            TRAINING,
            sizes.training_bytes // sizes.shards.weights,
            f"raise train.ranks, or {_SMALLER_DRAFT}",
        ),
        MemoryPart(
            "embedding and head of the target",
            sizes.frozen_bytes // sizes.shards.vocabulary,
            "set train.dtype=bfloat16"
            if config.train.dtype == "float32"
            else "choose a smaller target (target)",
        ),
    ]
    if not run.backend.capabilities().device_ipc:  # else they are used where they arrive
        features = tokens * run.schema.bytes_per_token()
        parts.append(MemoryPart("the features of a forward pass", features, "raise train.accumulation"))
    return parts


def _window(sizes: RunSizes, ranks: int) -> MemoryPart:
    return MemoryPart("features in flight", sizes.window_bytes * ranks, "lower placement.window_bytes")


def _disk(run: RunSpec, sizes: RunSizes) -> MemoryPool:
    train = run.config.train
    directory = run.directory
    saves = min(train.keep + 1, ceil(run.schedule.total_steps / train.save_every))
    saves -= sum(1 for _ in directory.checkpoints.glob("step-*"))
    output = directory.root.absolute()
    there = next(folder for folder in (output, *output.parents) if os.path.isdir(folder))
    number = max(0, saves)
    room = "set output to a folder with more room"
    parts = [
        MemoryPart(counted(number, "checkpoint"), number * sizes.state_bytes, f"lower train.keep, or {room}"),
        MemoryPart("the exported draft", 2 * sizes.num_trained, room),
    ]
    return MemoryPool(f"the disk of output {there}", shutil.disk_usage(there).free, parts)


def shown_size(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"
