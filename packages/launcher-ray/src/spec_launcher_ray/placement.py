"""Assign a host and devices to each worker.

The placement is a pure function of the hosts and the workers, so the command ``plan`` shows the placement of a
run. The launcher numbers the devices of all hosts. Workers that share a device form one *bundle*, which Ray
reserves as a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest

from spec_core import WorkerSpec
from spec_core.errors import ConfigError, RunError


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node of the cluster that has devices of the run's backend."""

    address: str
    """Address of the host; empty for the host of a cluster that is not started yet."""
    node: str = ""
    """Ray's id of the node."""
    num_devices: int
    units: float = 1.0
    """Amount of Ray's resource per device: 1, or the number of cores if all cores are one device."""
    free: float = field(default=0.0, compare=False)
    """Amount of Ray's resource that was free when the hosts were listed."""

    @property
    def num_free(self) -> int:
        """Number of devices that were free when the hosts were listed."""
        return min(self.num_devices, int(self.free / self.units + 1e-9))


@dataclass(frozen=True)
class Bundle:
    """Consecutive devices of one host, and the workers that use them; no other worker uses these devices."""

    host: Host
    devices: range
    """Indices of the bundle's devices on the host."""
    workers: tuple[WorkerSpec, ...]

    @property
    def amount(self) -> float:
        """Amount of Ray's resource for all devices of the bundle."""
        return len(self.devices) * self.host.units

    def amount_of(self, worker: WorkerSpec) -> float:
        """Return the amount of Ray's resource that the worker's actor requests.

        Ray counts in steps of 0.0001, and an actor cannot request a fraction of several devices. So a worker that
        shares several devices requests 0; only the placement-group bundle reserves its devices.
        """
        if len(self.workers) == 1:
            return self.amount
        if len(self.devices) > 1:
            return 0.0
        share = worker.share / max(1.0, sum(other.share for other in self.workers))
        return int(share * self.amount * 10_000) / 10_000


class DeviceTable:
    """The devices of all given hosts, numbered from 0."""

    def __init__(self, hosts: Sequence[Host], spread: bool = False) -> None:
        """Number the devices host by host or, with ``spread``, one of each host in turn.

        Free devices come first.
        """
        free = [_devices(host, range(host.num_free)) for host in hosts]
        used = [_devices(host, range(host.num_free, host.num_devices)) for host in hosts]
        self._devices = [*_numbered(free, spread), *_numbered(used, spread)]
        self._spread = spread

    def __len__(self) -> int:
        """Return the number of devices."""
        return len(self._devices)

    def bundles(self, workers: Iterable[WorkerSpec]) -> list[Bundle]:
        """Return the bundles of the workers, in the order of their first devices.

        Raise ConfigError if the devices of a worker do not exist, or are not consecutive devices of one host.
        """
        sharing: list[list[WorkerSpec]] = []
        stop = 0
        for worker in sorted(workers, key=lambda worker: worker.first_device):
            if worker.first_device >= stop:
                sharing.append([])
            sharing[-1].append(worker)
            stop = max(stop, worker.first_device + worker.num_devices)
        return [self._bundle(group) for group in sharing]

    def _bundle(self, workers: Sequence[WorkerSpec]) -> Bundle:
        places = [self._place(worker) for worker in workers]
        host = places[0][0]
        first = min(first for _, first in places)
        stop = max(first + worker.num_devices for (_, first), worker in zip(places, workers, strict=True))
        return Bundle(host, range(first, stop), tuple(workers))

    def _place(self, worker: WorkerSpec) -> tuple[Host, int]:
        """Return the worker's host and the index of its first device on that host."""
        numbers = range(worker.first_device, worker.first_device + worker.num_devices)
        if numbers.stop > len(self):
            raise ConfigError(
                f"{worker.name} needs device {numbers.stop - 1}, but the hosts have {len(self)} devices"
            )
        places = [self._devices[number] for number in numbers]
        host, first = places[0]
        if places != [(host, first + step) for step in range(worker.num_devices)]:
            found = ", ".join(f"{device} of {there.address}" for there, device in places)
            divisor = "engine.tensor_parallel to a divisor of a host's devices"
            advice = "launcher.spread=false" if self._spread else divisor
            raise ConfigError(
                f"{worker.name} needs {worker.num_devices} neighbouring devices of one host, but would get {found}; "
                f"set {advice}, or wait until whole hosts are free"
            )
        return host, first


def place(
    hosts: Sequence[Host], workers: Sequence[WorkerSpec], spread: bool = False, home: str | None = None
) -> list[Bundle]:
    """Place the workers on devices and return their bundles. Raise ConfigError if they do not fit.

    The first trainer writes the run directory, so it gets a device of the host at the address ``home``, if
    there is one. If the engines would take all devices of that host, the other hosts are filled first.
    """
    bundles = DeviceTable(hosts, spread).bundles(workers)
    first = next((worker for worker in workers if worker.role == "trainer"), None)
    own = next((host for host in hosts if host.address == home), None)
    if first is None or own is None or _host_of(first, bundles) == own:
        return bundles
    before = [host for host in hosts if host != own]
    number = first.first_device % len(hosts) if spread else _last_before(before, own, first.first_device)
    with suppress(ConfigError):  # raised if they do not fit in this order
        moved = DeviceTable([*before[:number], own, *before[number:]], spread).bundles(workers)
        if _host_of(first, moved) == own:
            return moved
    return bundles


def _host_of(worker: WorkerSpec, bundles: Sequence[Bundle]) -> Host:
    return next(bundle.host for bundle in bundles if worker in bundle.workers)


def _last_before(others: Sequence[Host], own: Host, device: int) -> int:
    """Return how many of ``others`` must precede ``own`` so that device number ``device`` is on ``own``.

    Devices are numbered host by host, and only free devices count.
    """
    stops = accumulate((host.num_free for host in others), initial=own.num_free)
    return sum(stop <= device for stop in stops)


def _devices(host: Host, numbers: range) -> list[tuple[Host, int]]:
    return [(host, number) for number in numbers]


def _numbered(devices: Sequence[Sequence[tuple[Host, int]]], spread: bool) -> list[tuple[Host, int]]:
    turns = zip_longest(*devices) if spread else devices
    return [device for device in chain.from_iterable(turns) if device is not None]


def neighbours(devices: list[int], who: str) -> list[int]:
    """Return ``devices``, the devices of a bundle, if they are consecutive, as backends require.

    Raise RunError if they are not.
    """
    if devices != list(range(devices[0], devices[0] + len(devices))):
        raise RunError(
            f"{who}: Ray has reserved devices {devices}, which are not neighbours; free more of this host"
        )
    return devices


def in_order(bundles: Sequence[Bundle], devices: Sequence[list[int]]) -> Iterator[tuple[Bundle, int]]:
    """Yield each bundle with the index of the reserved bundle for it.

    Reserved bundles of the same host and size are assigned in the order of their devices.
    """
    alike: dict[tuple[Host, int], list[int]] = {}
    for number, bundle in enumerate(bundles):
        alike.setdefault((bundle.host, len(bundle.devices)), []).append(number)
    for numbers in alike.values():
        for number, reserved in zip(numbers, sorted(numbers, key=devices.__getitem__), strict=True):
            yield bundles[number], reserved
