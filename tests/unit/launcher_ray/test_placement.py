"""Which worker gets which devices of which host, without Ray."""

import pytest

from spec_core import Role, WorkerSpec
from spec_core.errors import ConfigError, RunError
from spec_launcher_ray.placement import DeviceTable, Host, in_order, neighbours, place


def host(address: str, num_devices: int, free: float | None = None, units: float = 1.0) -> Host:
    amount = num_devices * units if free is None else free
    return Host(address=address, node=address, num_devices=num_devices, units=units, free=amount)


def worker(
    name: str, first: int, num_devices: int = 1, share: float = 1.0, role: Role = "engine"
) -> WorkerSpec:
    return WorkerSpec(
        name=name, entry="", arguments={}, role=role, first_device=first, num_devices=num_devices, share=share
    )


def places(table: DeviceTable, *workers: WorkerSpec) -> list[tuple[str, list[int], list[str]]]:
    return [
        (bundle.host.address, list(bundle.devices), [spec.name for spec in bundle.workers])
        for bundle in table.bundles(workers)
    ]


def test_devices_are_numbered_host_by_host_or_in_turns():
    workers = [worker(name, number) for number, name in enumerate("abc")]
    hosts = [host("h1", 2), host("h2", 2)]
    packed = [("h1", [0], ["a"]), ("h1", [1], ["b"]), ("h2", [0], ["c"])]
    assert places(DeviceTable(hosts), *workers) == packed
    in_turns = [("h1", [0], ["a"]), ("h2", [0], ["b"]), ("h1", [1], ["c"])]
    assert places(DeviceTable(hosts, spread=True), *workers) == in_turns


def test_free_devices_come_before_those_that_others_use():
    table = DeviceTable([host("h1", 2, free=1), host("h2", 1)])
    assert len(table) == 3
    assert places(table, worker("a", 1), worker("b", 2)) == [("h2", [0], ["a"]), ("h1", [1], ["b"])]


def test_workers_that_share_devices_are_one_bundle():
    table = DeviceTable([host("h1", 4)])
    workers = [worker("wide", 0, 2), worker("low", 0), worker("high", 1), worker("alone", 3)]
    assert places(table, *workers) == [("h1", [0, 1], ["wide", "low", "high"]), ("h1", [3], ["alone"])]


def test_an_actor_asks_for_its_share_of_one_device_and_for_whole_devices():
    pair, alone = DeviceTable([host("h1", 4)]).bundles(
        [worker("a", 0, share=1 / 3), worker("b", 0, share=2 / 3), worker("wide", 1, 2)]
    )
    assert [pair.amount_of(spec) for spec in pair.workers] == [0.3333, 0.6666]
    assert alone.amount_of(alone.workers[0]) == 2.0
    (several,) = DeviceTable([host("h1", 2)]).bundles([worker("a", 0, 2, 0.5), worker("b", 0, 2, 0.5)])
    assert [several.amount_of(spec) for spec in several.workers] == [0.0, 0.0]
    assert several.amount == 2.0


def test_shares_never_exceed_the_cores_of_a_host():
    (bundle,) = DeviceTable([host("h1", 1, units=8.0)]).bundles([worker("a", 0), worker("b", 0)])
    assert [bundle.amount_of(spec) for spec in bundle.workers] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("first", "spread", "order"),
    [
        (0, False, "own b c"),  # colocated
        (2, False, "b own c"),
        (5, False, "b c own"),
        (3, True, "own b c"),
        (4, True, "b own c"),
    ],
)
def test_the_first_trainer_is_on_the_own_host_whatever_engines_take(first, spread, order):
    hosts = [host("own", 2), host("b", 2), host("c", 2)]
    workers = [
        *(worker(f"engine-{device}", device) for device in range(first)),
        worker("rank", first, role="trainer"),
    ]
    expected = DeviceTable([host(name, 2) for name in order.split()], spread).bundles(workers)
    assert place(hosts, workers, spread, "own") == expected
    assert expected[-1].host.address == "own"
    assert place(hosts, workers, spread) == DeviceTable(hosts, spread).bundles(workers)


def test_where_the_own_host_cannot_have_the_first_trainer_the_order_stays():
    hosts, rank = [host("own", 1), host("b", 4)], worker("rank", 2, role="trainer")
    assert place(hosts, [rank], home="own") == place(hosts, [rank]) == place(hosts, [rank], home="elsewhere")


@pytest.mark.parametrize(
    ("spread", "words"),
    [(False, "set engine.tensor_parallel to a divisor"), (True, "set launcher.spread=false")],
)
def test_the_devices_of_a_worker_are_of_one_host(spread, words):
    table = DeviceTable([host("h1", 3), host("h2", 3)], spread)
    with pytest.raises(ConfigError, match=f"^a needs 2 neighbouring devices of one host, .*{words}"):
        table.bundles([worker("a", 2, 2)])


def test_a_device_that_no_host_has_is_named():
    with pytest.raises(ConfigError, match=r"^a needs device 4, but the hosts have 2 devices$"):
        DeviceTable([host("h1", 2)]).bundles([worker("a", 4)])


def test_bundles_of_a_host_are_taken_in_the_order_of_their_devices():
    """Ray gives them as it likes; a bundle of another size or host keeps its place."""
    table = DeviceTable([host("h1", 4), host("h2", 1)])
    bundles = table.bundles([worker("a", 0), worker("b", 1), worker("wide", 2, 2), worker("c", 4)])
    taken = {bundle.workers[0].name: number for bundle, number in in_order(bundles, [[3], [0], [1, 2], [0]])}
    assert taken == {"a": 1, "b": 0, "wide": 2, "c": 3}


def test_devices_apart_are_refused():
    assert neighbours([1, 2], "host h1") == [1, 2]
    with pytest.raises(
        RunError, match=r"^host h1: Ray has reserved devices \[0, 3\], which are not neighbours"
    ):
        neighbours([0, 3], "host h1")
