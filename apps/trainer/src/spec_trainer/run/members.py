"""Members are the processes of a run, each with its role, its devices, and its share of these devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spec_core import WorkerSpec
from spec_core.errors import ConfigError
from spec_core.wording import counted
from spec_trainer.run.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from spec_core import Role
    from spec_core.records import Capabilities
    from spec_trainer.configuration.run import AnyRunConfig, PlacementConfig

Place = tuple["Role", int, range]
"""Role, index and devices of a process."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a run, with its role and its devices."""

    role: Role
    index: int
    """Index of the process among the engine replicas, the decoders or the trainer ranks."""
    decodes: bool = False
    """Whether the process is an engine that decodes and does not capture."""
    first_device: int
    """Index of the process's first device among the launcher's devices."""
    num_devices: int = 1
    """Number of consecutive devices of the process, from ``first_device`` on."""
    share: float
    """Share of the compute of each device of the process, more than 0 and at most 1."""
    memory_fraction: float | None
    """Share of each device's memory that the process may take; None for no limit."""
    uncounted_bytes: int = 0
    """Bytes of each device that the process takes in addition to ``memory_fraction``."""
    init_order: int = 0
    """The process uses no device before all members with a lower ``init_order`` are ready. An engine measures its
    device's free memory when it starts; memory that another process allocates meanwhile would falsify the result."""
    host: str = ""
    """Address of the process's host; empty for this host."""

    @property
    def name(self) -> str:
        """Role and index, such as ``engine-0`` or ``decoder-1``."""
        return f"{'decoder' if self.decodes else self.role}-{self.index}"

    @property
    def devices(self) -> range:
        """Indices of the process's devices among the launcher's devices."""
        return range(self.first_device, self.first_device + self.num_devices)

    @property
    def worker(self) -> WorkerSpec:
        """WorkerSpec by which a launcher places the process; its ``entry`` and ``arguments`` are empty."""
        return WorkerSpec(
            name=self.name,
            entry="",
            arguments={},
            role=self.role,
            first_device=self.first_device,
            num_devices=self.num_devices,
            share=self.share,
        )


def members(config: AnyRunConfig, capabilities: Capabilities, window_bytes: int = 0) -> list[Member]:
    """Return every process of a run. Raise ConfigError if devices or device memory do not suffice.

    Colocated engines and ranks both start at device 0 and share devices. Disaggregated engines get the first devices,
    and ranks the next ones. After the last device, both continue at device 0; processes on one device share it
    evenly. With ``data.features`` no engines capture. In a run that decodes, the last engines decode and the others
    capture. ``window_bytes``: the most bytes of features in flight to each rank.
    """
    places = list(_places(config, capabilities.num_devices))
    num_capturing = config.engine.replicas
    roles_of = _roles_of_devices(places)
    neighbours = [[roles_of[device] for device in devices] for _, _, devices in places]
    budget = MemoryBudget(capabilities, window_bytes)
    limits = [
        _memory_limit(config.placement, role, roles, budget) if capabilities.memory_limit else None
        for (role, _, _), roles in zip(places, neighbours, strict=True)
    ]
    return [
        Member(
            role=role,
            index=index - num_capturing if role == "engine" and index >= num_capturing else index,
            decodes=role == "engine" and index >= num_capturing,
            first_device=devices[0],
            num_devices=len(devices),
            share=_compute_share(config.placement, role, roles),
            memory_fraction=limit,
            uncounted_bytes=budget.uncounted_bytes(role),
            init_order=init_order,
        )
        for (role, index, devices), roles, limit, init_order in zip(
            places, neighbours, limits, _init_orders(places, limits), strict=True
        )
    ]


def with_fewer_ranks(config: AnyRunConfig, ranks: int) -> AnyRunConfig:
    """Return the configuration with fewer trainer ranks, and with engines and decoders in proportion.

    Each rank's share of a global batch grows, so ``train.accumulation`` grows too: no rank needs more memory.
    """
    before = config.train.ranks
    numbers = {
        "train": {"ranks": ranks, "accumulation": -(-config.train.accumulation * before // ranks)},
        "engine": {"replicas": max(1, config.engine.replicas * ranks // before)},
        "decode": {"replicas": max(1, config.decode.replicas * ranks // before)},
    }
    sections = {name: getattr(config, name).model_copy(update=changed) for name, changed in numbers.items()}
    return config.model_copy(update=sections)


def most_on_a_device(config: AnyRunConfig, num_devices: int) -> int:
    """Return the largest number of processes on a device. Raise ConfigError if devices do not suffice."""
    return max(map(len, _roles_of_devices(_places(config, num_devices)).values()))


def on_hosts(found: Sequence[Member], hosts: Mapping[str, str]) -> list[Member]:
    """Return the processes of a run with the addresses of their hosts.

    ``hosts``: name of a process -> address of its host.
    """
    return [replace(member, host=hosts[member.name]) for member in found]


def _places(config: AnyRunConfig, num_devices: int) -> Iterator[Place]:
    """Yield role, index and devices of each process; an engine's devices are consecutive."""
    width = config.engine.tensor_parallel
    if width > num_devices:
        raise ConfigError(
            f"engine.tensor_parallel={width}, but the launcher has {counted(num_devices, 'device')} of backend "
            f"{config.backend.name}; set engine.tensor_parallel={num_devices} or less"
        )
    engines = config.engine.replicas if config.data.features is None else 0
    if config.decodes:
        engines += config.decode.replicas
    for index in range(engines):
        first = index % (num_devices // width) * width
        yield "engine", index, range(first, first + width)
    taken = 0 if config.placement.kind == "colocated" else engines * width
    for rank in range(config.train.ranks):
        device = (taken + rank) % num_devices
        yield "trainer", rank, range(device, device + 1)


def _roles_of_devices(places: Iterable[Place]) -> dict[int, list[Role]]:
    """Return, for each device, the role of each process on it."""
    roles: dict[int, list[Role]] = {}
    for role, _, devices in places:
        for device in devices:
            roles.setdefault(device, []).append(role)
    return roles


def _init_orders(places: Sequence[Place], limits: Sequence[float | None]) -> Iterator[int]:
    """Yield ``Member.init_order`` of each process: engines of a device come in turn, then all ranks.

    Only engines with a memory limit wait for each other. All ranks have the same number, because no rank is
    ready before all of them are.
    """
    engines = Counter[int]()
    limited = list(zip(places, limits, strict=True))
    ranks_wait = any(limit is not None for (role, _, _), limit in limited if role == "trainer")
    for (role, _, devices), limit in limited:
        if role == "trainer":
            yield max(engines.values(), default=0) if ranks_wait else 0
        else:
            yield engines[devices[0]]
            engines[devices[0]] += limit is not None


def _compute_share(placement: PlacementConfig, role: Role, neighbours: Sequence[Sequence[Role]]) -> float:
    """Return the process's share of a device's compute; shares on one device add up to at most 1.

    ``neighbours``: for each device of the process, the roles of all processes on it.
    """
    if placement.kind != "colocated":
        return 1 / max(map(len, neighbours))
    return _fractions(placement)[role] / max(roles.count(role) for roles in neighbours)


def _fractions(placement: PlacementConfig) -> dict[Role, float]:
    """Return the fraction of a shared device for each role.

    A role without a configured fraction gets the rest of the device. If no role has one, each gets half.
    """
    engine, trainer = placement.engine_fraction, placement.trainer_fraction
    if engine is None:
        engine = 0.5 if trainer is None else 1 - trainer
    return {"engine": engine, "trainer": 1 - engine if trainer is None else trainer}


def _memory_limit(
    placement: PlacementConfig, role: Role, neighbours: Sequence[Sequence[Role]], budget: MemoryBudget
) -> float | None:
    """Return a process's memory fraction; None for a disaggregated process that shares no device.

    ``neighbours``: for each device of the process, the roles of all processes on it.
    """
    if placement.kind == "colocated":
        return min(budget.fractions(placement, roles)[role] / roles.count(role) for roles in neighbours)
    shared = [roles for roles in neighbours if len(roles) > 1]
    return min(map(budget.even_fraction, shared), default=None)
