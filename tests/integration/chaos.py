"""Kills and stops the processes of a run at steps drawn from a seed; then looks at what has become of the run.

    python -m tests.integration.chaos --launcher local --steps 200 --faults 30      # make test-chaos: both launchers

Under ``ray`` the run is on a cluster of several nodes. Their raylets are killed, too, but for that of the run's own
node; each node comes back once its loss is told. Every fault is named in the output of the run or in
``logs/replacements.jsonl``, every sample is trained exactly once, and the final weights are those of a run that
nothing disturbed, bit for bit. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .launching import (
    Lab,
    Run,
    assert_bitwise_equal,
    assert_trained_exactly_once,
    last_step,
    losses,
    write_rows,
    write_stranger,
)
from .ray_nodes import RayNodes, ray_nodes

PEER_S = 5
KEPT_S = 30
"""Longest time in which everything must be gone after kill -9 of the run's own process."""
WORKER = "spec_core.processes.worker_main"
LAST_STEPS = 40
"""Steps at the end without a fault: the last ones may come late."""
KINDS = {"kill engine": 16, "stop engine": 8, "kill trainer": 4, "stop trainer": 1, "kill run": 3}
"""Kind of fault -> how often it comes, relative to the others. One that stops costs PEER_S."""
ON_NODES = {**KINDS, "kill raylet": 6}
NUM_NODES = 5
"""One for each worker, and one to move to."""


@dataclass
class Chaos:
    """One run with faults; the same command again where its own process was killed."""

    lab: Lab
    output: Path
    keys: dict[str, object]
    draw: random.Random
    nodes: RayNodes | None = None
    """The cluster that it runs on; None for the launcher local."""
    faults: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    _end: tuple[str, int] = ("", -1)
    """What the run says once the last fault that ends its workers has done that, and how often it had before."""
    _gone: str | None = None
    """Address of the node whose raylet was killed last, until it is back."""

    def run(self, num_faults: int, steps: int) -> None:
        """Train to the end, with so many faults."""
        moments = sorted(self.draw.choices(range(1, steps - LAST_STEPS), k=num_faults))
        run = self._start()
        while (code := run.process.poll()) is None or code < 0:
            if code is not None:
                self._check_nothing_left(run)
                run = self._start()
            due = moments[len(self.faults) :] and last_step(self.output) >= moments[len(self.faults)]
            if not self._ending(run):
                self._bring_back()
                if due:
                    self._fault(run)
            time.sleep(0.05)
        self.endings.append(run.errors.read_text())
        assert code == 0, run.story()
        assert len(self.faults) >= num_faults, f"the run was done after {len(self.faults)} faults"

    def _start(self) -> Run:
        self._end = ("", -1)
        return self.lab.start(self.output, **self.keys)

    def _fault(self, run: Run) -> None:
        """Cause a fault of a kind that is drawn, once somebody is ready: then there is a victim for most kinds."""
        if not ready_workers(run, self._processes(run), ""):
            return
        kinds = KINDS if self.nodes is None else ON_NODES
        (kind,) = self.draw.choices(list(kinds), list(kinds.values()))
        what, whom = kind.split()
        workers = ready_workers(run, self._processes(run), "" if whom == "raylet" else whom)
        if whom == "run":
            run.until_ready()
            self.endings.append(run.errors.read_text())
            run.process.kill()
            run.process.wait()
        elif whom == "raylet":
            hosts = sorted({host for worker in workers.values() if (host := self._host_of(worker))})
            if not hosts:
                return
            assert self.nodes is not None
            self._gone = self.draw.choice(hosts)
            self._expect(run, f"its host {self._gone} does not answer")
            self.nodes.kill_raylet(self._gone)
            kind = f"{what} {self._gone}"
        else:
            if not workers:
                return
            victim = self.draw.choice(sorted(workers))
            if whom == "trainer":
                self._expect(run, "the run begins again")
            with suppress(psutil.NoSuchProcess):
                workers[victim].send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            kind = f"{what} {victim}"
        self.faults.append(kind)
        print(f"{len(self.faults):3} {kind}", flush=True)

    def _expect(self, run: Run, words: str) -> None:
        self._end = (words, run.errors.read_text().count(words))

    def _ending(self, run: Run) -> bool:
        """Whether workers still end for the last fault: another one would have no part in that."""
        words, times = self._end
        return run.errors.read_text().count(words) <= times

    def _bring_back(self) -> None:
        """Have the node serve again whose raylet was killed: nothing of the run has stayed there."""
        if self.nodes is not None and self._gone is not None:
            self.nodes.clear(self._gone)
            self.nodes.start(self._gone)
            self._gone = None

    def _host_of(self, worker: psutil.Process) -> str | None:
        assert self.nodes is not None
        with suppress(psutil.Error):
            return self.nodes.node_of(worker)
        return None

    def _processes(self, run: Run) -> list[psutil.Process]:
        return [*run.processes(), *(self.nodes.processes() if self.nodes else ())]

    def _check_nothing_left(self, run: Run) -> None:
        deadline = time.monotonic() + KEPT_S
        while left := self._processes(run):
            assert time.monotonic() < deadline, f"left {KEPT_S} s after kill -9: {left}"
            time.sleep(0.1)

    def check(self, quiet: Path, steps: int) -> None:
        """Compare with the quiet run, and look for the name and the cause of every fault."""
        assert_trained_exactly_once(self.output, range(40))
        for step, (found, expected) in enumerate(zip(losses(self.output), losses(quiet), strict=True), 1):
            assert found == expected, f"loss {found} of step {step}, {expected} in the quiet run"
        assert_bitwise_equal(self.output, quiet, steps)
        lines = (self.output / "logs" / "replacements.jsonl").read_text().splitlines()
        causes = [json.loads(line)["cause"] for line in lines]
        text = "\n".join(self.endings)
        named = [line for line in text.splitlines() if "begins again at its newest checkpoint" in line]
        print(f"{len(self.faults)} faults, {len(causes)} engines replaced, {len(named)} restarts of the run")
        for fault in self.faults:
            what, victim = fault.split()
            words = "silent" if what == "stop" else "was"
            told = [*causes, *named]
            assert victim == "run" or any(
                (one.startswith(victim) and words in one) or victim in one for one in told
            ), fault


def ready_workers(run: Run, processes: list[psutil.Process], role: str) -> dict[str, psutil.Process]:
    """Return the workers of a role, by name, of a run that is ready, and that are ready themselves."""
    text = run.errors.read_text()
    last = text.rpartition("the run begins again")[2]
    if "every process is ready" not in last:
        return {}
    found: dict[str, psutil.Process] = {}
    for process in processes:
        with suppress(psutil.Error):
            words = process.cmdline()
            name = words[words.index(WORKER) + 1] if WORKER in words else ""
            ready = last.count(f"{name} is ready") > last.count(f"{name} is replaced")
            if name and name.startswith(role) and ready and process.status() != psutil.STATUS_STOPPED:
                found[name] = process
    return found


def make_target(folder: Path) -> Path:
    """Return a tiny Llama with large weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.6,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Run the quiet run and the disturbed one; print what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", default="local")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # else Ray's nodes and this host have different ones
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        keys = {
            "target": make_target(folder / "target"), "data.path": write_rows(folder / "rows.jsonl"),
            "train.steps": given.steps, "train.schedule": "constant", "train.lr": 3e-3, "train.warmup_steps": 5,
            "train.global_batch_tokens": 96, "train.save_every": 5, "draft.num_steps": 3,
            "placement.kind": "disaggregated", "engine.replicas": 2, "train.ranks": 2,
            "launcher.name": given.launcher,
        }  # fmt: skip
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(folder, keys, write_stranger(folder / "stranger")))
            start = time.monotonic()
            lab.train(folder / "quiet", timeout_s=600, launcher__name="local")
            quiet_s = time.monotonic() - start
            tries = {"engine__replacements": 1000, "train__restarts": 1000, "timeouts__peer_s": PEER_S}
            chaos = Chaos(lab, folder / "chaos", tries, random.Random(given.seed))
            if given.launcher == "ray":
                chaos.nodes = stack.enter_context(ray_nodes(NUM_NODES))
                tries |= {"launcher__address": chaos.nodes.address, "launcher__env": {"OMP_NUM_THREADS": "1"}}
            start = time.monotonic()
            chaos.run(given.faults, given.steps)
            print(f"quiet run {quiet_s:.0f} s, with faults {time.monotonic() - start:.0f} s")
            chaos.check(folder / "quiet", given.steps)
    print("every sample once, bitwise the weights of the quiet run, every fault named")


if __name__ == "__main__":
    main()
