"""The end that sends through shared memory, towards a rank that is stopped."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from spec_core import Manifest, WeightTransportConfig
from spec_core.errors import PeerLost
from spec_kit.weight_sync.digest import tensor_entries
from spec_testing.reference import reference_backend
from spec_weight_transports import ipc

RANK = """
from spec_testing.reference import reference_backend
from spec_weight_transports import ipc
receiver = reference_backend().transport("colocated").listen(ipc._SCHEMA, 1 << 20)
print(receiver.address, flush=True)
input()
"""


@pytest.fixture
def stopped():
    """The address of a rank whose process is stopped."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RANK], **pipes) as rank:
        address = rank.stdout.readline().strip()
        os.kill(rank.pid, signal.SIGSTOP)
        yield address
        rank.kill()


def test_close_ends_an_update_whose_rank_takes_no_connection(stopped, monkeypatch):
    monkeypatch.setattr(ipc, "_CONNECT_S", 0.5)
    transport = ipc.IpcWeightTransport(WeightTransportConfig(), reference_backend())
    weights = {"weight": torch.ones(3)}
    entries = tuple(tensor_entries(weights.items()))
    manifest = Manifest(group="g", version=1, fence=1, target="t", tensors=entries)
    sender = transport.sender(manifest, weights, [stopped], torch.device("cpu"), "replica")
    closing = threading.Timer(0.2, sender.close)
    closing.start()
    with pytest.raises(PeerLost, match="closed"):
        sender.send(time.monotonic() + 600)
    closing.join()
