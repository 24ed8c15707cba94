"""A transport that cannot reach a rank says why, before anything is sent."""

import dataclasses
import logging
import re

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import WeightMedium, WeightTransportConfig
from spec_core.errors import ConfigError, PluginError
from spec_kit.weight_sync import open_weight_transports
from spec_testing.reference import reference_backend
from spec_weight_transports.collective import CollectiveTransport
from spec_weight_transports.file import FileConfig
from spec_weight_transports.ipc import IpcWeightTransport

from ...distributions import write_distribution

CPU = torch.device("cpu")


@pytest.fixture(params=[CollectiveTransport, IpcWeightTransport])
def transport(request):
    return request.param(WeightTransportConfig(), reference_backend())


def test_rank_of_this_host_is_reached(transport):
    assert transport.obstacle(transport.location(CPU), CPU) == ""


@pytest.mark.parametrize("part", range(4))
def test_other_boot_namespace_or_user_is_elsewhere(transport, part):
    host, bar, rest = transport.location(CPU).partition("|")
    parts = host.split("/")
    parts[part] = "another"
    assert "another host" in transport.obstacle("/".join(parts) + bar + rest, CPU)


class OneThread(CpuBackend):
    """A backend whose devices have names, and whose collectives come from one thread."""

    @classmethod
    def capabilities(cls):
        return dataclasses.replace(super().capabilities(), concurrent_collectives=False)

    def device_id(self, device):
        return "card 1"


@pytest.fixture
def collective():
    return CollectiveTransport(WeightTransportConfig(), OneThread(OneThread.Config()))


def test_collective_refuses_the_senders_own_device(collective):
    assert "own device" in collective.obstacle(collective.location(CPU), CPU)


def test_collective_refuses_a_rank_in_groups_of_another_backend(collective):
    class Named(OneThread):
        name = "named"

    named = CollectiveTransport(WeightTransportConfig(), Named(Named.Config()))
    reason = collective.obstacle(named.location(CPU), CPU)
    assert reason == "its groups are those of backend 'named', the sender's of 'cpu'"


def test_collective_refuses_a_rank_whose_library_is_set_otherwise(collective):
    class Set(OneThread):
        def group_settings(self):
            return "CCL_MEMORY=0"

    other = CollectiveTransport(WeightTransportConfig(), Set(Set.Config()))
    reason = collective.obstacle(other.location(CPU), CPU)
    assert reason == "its process has CCL_MEMORY=0 and the sender's none; start both with the same"


def test_collective_refuses_a_rank_whose_tensors_are_elsewhere(collective):
    location = collective.location(torch.device("meta"))
    assert (
        collective.obstacle(location, CPU) == "it has its tensors on meta; groups of backend 'cpu' take cpu"
    )


def test_collective_refuses_a_sender_whose_tensors_are_elsewhere(collective):
    reason = collective.obstacle(collective.location(CPU), torch.device("meta"))
    assert reason.startswith("the sender has its tensors on meta")


def test_collective_keeps_off_torchs_groups_where_one_thread_must_make_all_calls(collective, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert "torch" not in collective.obstacle(collective.location(CPU), CPU)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert collective.obstacle(collective.location(CPU), CPU).startswith("it uses torch's own groups")
    several = CollectiveTransport(WeightTransportConfig(), reference_backend())
    assert several.obstacle(several.location(CPU), CPU) == ""


def test_ipc_goes_through_the_device_that_both_are_on_and_last_within_a_process():
    ipc = IpcWeightTransport(WeightTransportConfig(), OneThread(OneThread.Config()))
    host, process, device_id = ipc.location(CPU).split("|")
    assert device_id == "card 1"
    assert ipc.medium(f"{host}|{process}|card 1", CPU) == WeightMedium.UNSTATED
    assert ipc.medium(f"{host}|another|card 1", CPU) == WeightMedium.DEVICE_MEMORY
    assert ipc.medium(f"{host}|another|card 2", CPU) == WeightMedium.HOST_MEMORY
    assert ipc.medium(f"{host}|another|", torch.device("meta")) == WeightMedium.HOST_MEMORY


def test_named_transports_come_in_that_order():
    names = ["ipc", "file"]
    assert list(open_weight_transports(reference_backend(), names)) == names


def test_each_transport_takes_the_options_that_it_has(tmp_path):
    transports = open_weight_transports(
        reference_backend(), ["ipc", "file"], {"bucket_bytes": 8192, "folder": tmp_path}
    )
    assert [transport.config.bucket_bytes for transport in transports.values()] == [8192, 8192]
    assert transports["file"].config.folder == tmp_path


def test_an_option_of_one_transport_comes_before_that_of_all():
    transports = open_weight_transports(
        reference_backend(), None, {"bucket_bytes": 8192}, {"file": FileConfig(bucket_bytes=4096, keep=7)}
    )
    assert transports["file"].config == FileConfig(bucket_bytes=4096, keep=7)
    assert transports["ipc"].config.bucket_bytes == 8192


BROKEN = """
from spec_weight_transports.ipc import IpcWeightTransport


class BrokenTransport(IpcWeightTransport):
    name = "broken"

    def __init__(self, config, backend):
        raise KeyError("card")
"""


def test_a_broken_transport_matters_only_to_whoever_names_it(monkeypatch, caplog, tmp_path):
    points = "[spec_core.weight_transports]\nbroken = broken_way:BrokenTransport\n"
    write_distribution(tmp_path, "their-dist", points)
    (tmp_path / "broken_way.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    line = r"weight transport 'broken' \(their-dist 1.0\) fails: KeyError: 'card'"
    with caplog.at_level(logging.INFO):
        assert sorted(open_weight_transports(reference_backend())) == ["collective", "file", "ipc"]
    assert re.search(line, caplog.text)
    for named in ({"names": ["broken"]}, {"configs": {"broken": WeightTransportConfig()}}):
        with pytest.raises(PluginError, match=line):
            open_weight_transports(reference_backend(), **named)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"folder": "a"}, "no weight transport among ipc has the option folder"),
        ({"bucket_bytes": 1}, "options of weight transport 'ipc': bucket_bytes: Input should be greater"),
    ],
)
def test_options_that_no_transport_takes_are_refused(options, line):
    with pytest.raises(ConfigError, match=line):
        open_weight_transports(reference_backend(), ["ipc"], options)
