"""A transport that cannot reach a rank says why, before anything is sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spec_core import WeightTransportConfig
from spec_core.errors import ConfigError
from spec_core.testing.reference import reference_backend
from spec_core.weight_sync import open_weight_transports
from spec_weight_transports.collective import CollectiveTransport
from spec_weight_transports.ipc import IpcWeightTransport

CPU = torch.device("cpu")


@pytest.fixture(params=[CollectiveTransport, IpcWeightTransport])
def transport(request):
    return request.param(WeightTransportConfig(), reference_backend())


def test_rank_of_this_host_is_reached(transport):
    assert transport.obstacle(transport.place(CPU), CPU) == ""


@pytest.mark.parametrize("part", range(4))
def test_other_boot_namespace_or_user_is_elsewhere(transport, part):
    host, space, device = transport.place(CPU).partition(" ")
    parts = host.split("/")
    parts[part] = "another"
    assert "another host" in transport.obstacle("/".join(parts) + space + device, CPU)


def test_collective_refuses_the_senders_own_device(monkeypatch):
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    transport = CollectiveTransport(WeightTransportConfig(), reference_backend())
    assert "own device" in transport.obstacle(transport.place(CPU), CPU)


def test_named_transports_come_in_that_order():
    names = ["ipc", "file"]
    assert list(open_weight_transports(reference_backend(), names)) == names


def test_each_transport_takes_the_options_that_it_has(tmp_path):
    transports = open_weight_transports(
        reference_backend(), ["ipc", "file"], {"bucket_bytes": 8192, "folder": tmp_path}
    )
    assert [transport.config.bucket_bytes for transport in transports.values()] == [8192, 8192]
    assert transports["file"].config.folder == tmp_path


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
