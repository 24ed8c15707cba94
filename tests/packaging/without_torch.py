"""Third parties' tracker, launcher and type of target where torch is not installed: ``without_torch.py FOLDER``."""

import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path

from spec_core import Backend, LaunchContext, Launcher, Tracker, WorkerEnded, WorkerSpec, plugins
from spec_core.records import Availability, Capabilities


class BareBackend(Backend):
    """A backend of processes that need no device."""

    name, api_version = "bare", 1

    @classmethod
    def probe(cls):
        return Availability(ok=True)

    @classmethod
    def capabilities(cls):
        return Capabilities()

    def child_env(self, role, share, local_rank, num_devices=1):
        return {"BARE_ROLE": role}

    def prepare_host(self, placement):
        return contextlib.nullcontext()

    def device(self, local_rank):
        raise NotImplementedError

    def process_group(self, rendezvous, device):
        raise NotImplementedError

    def transport(self, placement):
        raise NotImplementedError


def answer(link, arguments):
    """Entry of the worker."""
    link.send({**arguments, "role": os.environ["BARE_ROLE"], "torch": "torch" in sys.modules})


def track(folder):
    lines = folder / "lines"
    with contextlib.closing(plugins.load(Tracker, "lines")(str(lines), folder)) as tracker:
        tracker.log(3, {"loss": 0.5})
    assert '"step": 3, "loss": 0.5' in lines.read_text()


def launch(folder):
    launcher_type = plugins.load_available(Launcher, "pipes")
    context = LaunchContext(backend=BareBackend(BareBackend.Config(name="bare")), logs=folder)
    spec = WorkerSpec(name="engine-0", entry="without_torch:answer", arguments={"number": 7}, role="engine")
    with launcher_type(launcher_type.Config(name="pipes"), context) as launcher:
        launcher.start([spec])
        message, ended = (launcher.receive(time.monotonic() + 60) for _ in range(2))
    assert message.message == {"number": 7, "role": "engine", "torch": False}
    assert isinstance(ended, WorkerEnded)


def find_target_type():
    records = [record for record in plugins.listed() if record.kind == "target_type"]
    assert [(record.name, *plugins.status(record)) for record in records] == [
        ("bailing_hybrid", "ok", "", None)
    ]
    assert plugins.find_target_type("bailing_hybrid", {}).theta == 6_000_000.0


if __name__ == "__main__":
    assert importlib.util.find_spec("torch") is None
    track(Path(sys.argv[1]))
    launch(Path(sys.argv[1]))
    find_target_type()
