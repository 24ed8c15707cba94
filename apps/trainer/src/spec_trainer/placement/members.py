"""Members of a run: the part, the devices and the share of them of each process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_core.launcher import WorkerSpec
from spec_trainer.placement.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from spec_core.backend import Role
    from spec_core.records import Capabilities
    from spec_trainer.config import AnyRunConfig, PlacementConfig

Place = tuple["Role", int, range]
"""Role, index and devices of a process."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a run."""

    role: Role
    index: int
    """Number of the engine replica, of the decoder or of the trainer rank."""
    decodes: bool = False
    """Whether it is an engine that decodes, and captures nothing."""
    first_device: int
    """Number of its first device among those of the launcher."""
    num_devices: int = 1
    """Number of its devices, from ``first_device`` on."""
    share: float
    """Share of the compute of each of its devices, 0..1]."""
    memory_fraction: float | None
    """Share of each device's memory that it may take; None for no limit."""
    uncounted_bytes: int = 0
    """Bytes of each device that it takes beside that limit."""
    init_order: int = 0
    """The process touches no device before the members of lower numbers are ready. An engine measures the free memory
    of its device when it starts, and would take for its own what another process takes meanwhile."""
    host: str = ""
    """Address of its host; empty for this one."""

    @property
    def name(self) -> str:
        """Part and index, as ``engine-0``."""
        return f"{'decoder' if self.decodes else self.role}-{self.index}"

    @property
    def devices(self) -> range:
        """Its devices among those of the launcher."""
        return range(self.first_device, self.first_device + self.num_devices)

    @property
    def worker(self) -> WorkerSpec:
        """The process as a launcher places it; it has no entry yet."""
        return WorkerSpec(
            name=self.name,
            entry="",
            order={},
            role=self.role,
            first_device=self.first_device,
            num_devices=self.num_devices,
            share=self.share,
        )


def members(config: AnyRunConfig, capabilities: Capabilities, window_bytes: int = 0) -> list[Member]:
    """Return every process of a run. Raise ConfigError where devices or their memory do not suffice.

    Colocated, engines and ranks both start at device 0 and share devices. Disaggregated, engines come first and ranks
    follow. After the last device, both begin again at device 0; processes of one device share it evenly. With
    ``data.features`` there are no engines; in a run that decodes, the last ones do that. ``window_bytes``: features
    in flight for each rank.
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

    Ranks take more passes for their larger shares, so that none needs more memory.
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
    """Return the most processes that share a device. Raise ConfigError as ``members`` does."""
    return max(map(len, _roles_of_devices(_places(config, num_devices)).values()))


def on_hosts(found: Sequence[Member], hosts: Mapping[str, str]) -> list[Member]:
    """Return the members with the hosts that the launcher has for them."""
    return [replace(member, host=hosts[member.name]) for member in found]


def _places(config: AnyRunConfig, num_devices: int) -> Iterator[Place]:
    """Yield the devices of each process; those of one engine are neighbours."""
    width = config.engine.tensor_parallel
    if width > num_devices:
        raise ConfigError(
            f"engine.tensor_parallel={width}, but the launcher has {num_devices} device(s) of backend "
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
    """Return the role of each process on each device."""
    roles: dict[int, list[Role]] = {}
    for role, _, devices in places:
        for device in devices:
            roles.setdefault(device, []).append(role)
    return roles


def _init_orders(places: Sequence[Place], limits: Sequence[float | None]) -> Iterator[int]:
    """Yield ``Member.init_order``: limited engines of a device one after the other, then all ranks.

    The ranks wait together, because none of them is ready before all are.
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
    """Return the share of the compute: the whole device is divided among its processes."""
    if placement.kind != "colocated":
        return 1 / max(map(len, neighbours))
    return _fractions(placement)[role] / max(roles.count(role) for roles in neighbours)


def _fractions(placement: PlacementConfig) -> dict[Role, float]:
    """Return each role's part of a shared device; a role without a fraction gets the rest, by default half."""
    engine, trainer = placement.engine_fraction, placement.trainer_fraction
    if engine is None:
        engine = 0.5 if trainer is None else 1 - trainer
    return {"engine": engine, "trainer": 1 - engine if trainer is None else trainer}


def _memory_limit(
    placement: PlacementConfig, role: Role, neighbours: Sequence[Sequence[Role]], budget: MemoryBudget
) -> float | None:
    """Return the memory fraction of a process; None for a disaggregated one that has its devices to itself."""
    if placement.kind == "colocated":
        return min(budget.fractions(placement, roles)[role] / roles.count(role) for roles in neighbours)
    shared = [roles for roles in neighbours if len(roles) > 1]
    return min(map(budget.even_fraction, shared), default=None)
