from __future__ import annotations

import pytest
import torch
from spec_weight_transport_socket.transport import SocketConfig, SocketTransport

from spec_testing import BUCKET_BYTES, WeightTransportSuite, reference_backend


def socket_transport():
    return SocketTransport(SocketConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


class TestSocketTransport(WeightTransportSuite):
    @pytest.fixture
    def build(self):
        return socket_transport


def test_a_rank_of_another_host_is_reached_at_an_address_of_this_one():
    here, cpu = socket_transport(), torch.device("cpu")
    assert "set push.options.socket.host" in here.obstacle("another", cpu)
    outside = SocketTransport(SocketConfig(host="192.0.2.1"), reference_backend())
    assert outside.obstacle("another", cpu) == ""
