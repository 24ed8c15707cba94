"""The trainer of ``push``: holds a draft on its device as a run does, and pushes it by a run's own parts.

It takes a command from each line of its standard input, as JSON, and answers each with a line.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measure import device_name
from trainer_step import Case
from trainer_step_case import LR, default_optimizer, make_problem

from spec_core import Backend, StepConfig, Strategy, plugins
from spec_kit.targets import read_target
from spec_kit.weight_sync import Publisher, separate_stream
from spec_trainer.configuration.chat import ChatConfig
from spec_trainer.push.request import PushRequest
from spec_trainer.push.servers import connect_servers, open_transports
from spec_trainer.push.snapshot import WeightSnapshot
from spec_trainer.run.draft_trainer import BatchShare, DraftTrainer

if TYPE_CHECKING:
    from spec_kit.weight_sync import PublishReport

TIMEOUT_S = 60.0


class PushTrainer:
    """A draft under the ``fsdp`` strategy on one device, and its pushes."""

    def __init__(self, case: Case, target: Path) -> None:
        """Build the draft with random weights."""
        plugin = plugins.load_available(Backend, case.backend)
        self._backend = plugin(plugin.Config(name=case.backend))
        self._device = self._backend.device(0)
        self._target = read_target(target)
        problem = make_problem(case, self._device, self._target)
        strategy_type = plugins.load_available(Strategy, "fsdp")
        strategy = strategy_type(
            strategy_type.Config(), StepConfig(dtype=case.dtype), default_optimizer(), self._device
        )
        self._module = problem.build(self._backend.kernel)
        strategy.attach(self._module, problem.draft.shard_hints(problem.target))
        ops = strategy.vocabulary_ops(problem.target, problem.tensors)
        self._trainer = DraftTrainer(problem.draft, strategy, ops, 0)
        self._share = BatchShare(
            micro_batches=case.passes * [problem.batch], denominators=case.passes * problem.denominators
        )
        self._snapshot = WeightSnapshot()
        self._publisher: Publisher | None = None
        self._version = 0

    def export(self, folder: str) -> dict[str, Any]:
        """Write the draft as a run exports it."""
        self._trainer.export(self._target, Path(folder), ChatConfig())
        return {"device": device_name(self._device)}

    def connect(self, urls: list[str], transport: str) -> dict[str, Any]:
        """Push to the servers at ``urls`` from now on; this trainer's pushes take over from another's."""
        request = PushRequest(
            draft_model=Path(), target="", to=urls, transport=[transport], backend=self._backend.name
        )
        transports = open_transports(self._backend, request)
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = Publisher(transports, self._target.digest, device=self._device)
        for name, server in connect_servers(request.to).items():
            self._publisher.add(name, server).result(TIMEOUT_S)
            status = server.status().result(TIMEOUT_S)
            self._version = max(self._version, status.version or 0)
        return {}

    def push(self, count: int, pause_s: float) -> list[dict[str, Any]]:
        """Push ``count`` times, other weights each time; return what came of each."""
        rows: list[dict[str, Any]] = []
        for _ in range(count):
            self._change_weights()
            taken = self._take()
            rows.append(taken | self._publish())
            time.sleep(pause_s)
        return rows

    def train(self, steps: int, rounds: int) -> dict[str, Any]:
        """Train ``steps`` steps without a push and as many with one after the first, alternately ``rounds`` times."""
        self._steps(3)
        quiet, pushing, pushes = [], [], []
        with ThreadPoolExecutor(1) as thread:
            for _ in range(rounds):
                quiet.append(self._steps(steps))
                taken: list[dict[str, Any]] = []
                report: list[Future[dict[str, Any]]] = []

                def begin(taken: list = taken, report: list = report) -> None:
                    taken.append(self._take())
                    report.append(thread.submit(self._publish))

                pushing.append(self._steps(steps, begin))
                pushes.append(taken[0] | report[0].result(TIMEOUT_S))
        step_ms = {
            name: [1e3 * sum(part) / steps for part in parts]
            for name, parts in (("without_push", quiet), ("with_push", pushing))
        }
        means = {name: sum(values) / rounds for name, values in step_ms.items()}
        return {
            "steps_per_push": steps,
            "step_ms": step_ms,
            "slower_by": means["with_push"] / means["without_push"] - 1,
            "step_ms_around_pushes": [[1e3 * part for part in parts[:6]] for parts in pushing],
            "wait_ms": [row["take_ms"] for row in pushes],
            "pushes": pushes,
        }

    def _steps(self, count: int, after_first: Any = None) -> list[float]:
        """Return the seconds of each of ``count`` steps; ``after_first`` is part of the first."""
        seconds: list[float] = []
        for number in range(count):
            begun = time.monotonic()
            self._trainer.step(self._share, LR).output.loss.item()
            if number == 0 and after_first is not None:
                after_first()
            seconds.append(time.monotonic() - begun)
        return seconds

    @torch.no_grad()
    def _change_weights(self) -> None:
        for parameter in self._module.parameters():
            parameter.mul_(-1.01)

    def _take(self) -> dict[str, Any]:
        """Copy the weights, as a run's loop does between two steps."""
        begun = time.monotonic()
        self._snapshot.take(self._trainer.gather_weights())
        return {"begun_s": begun, "take_ms": 1e3 * (time.monotonic() - begun)}

    def _publish(self) -> dict[str, Any]:
        """Push the copy, as a run does on a thread of its own."""
        assert self._publisher is not None
        self._version += 1
        begun = time.monotonic()
        with separate_stream(self._device):
            weights = self._trainer.exported(self._snapshot.read(), self._target)
            exported = time.monotonic()
            report = self._publisher.publish(self._version, weights, timeout_s=TIMEOUT_S).result()
        ended = time.monotonic()
        return {
            "ended_s": ended,
            "export_ms": 1e3 * (exported - begun),
            "push_ms": 1e3 * (ended - begun),
        } | _parts(report)


def _parts(report: PublishReport) -> dict[str, Any]:
    """Return a report as plain values: ``parts_ms`` of the push, ``replica_ms`` of its slowest replica."""
    outcomes = report.replicas.values()
    return {
        "version": report.version,
        "committed": report.committed,
        "bytes": report.num_bytes,
        "transport": ", ".join(sorted({outcome.transport for outcome in outcomes})),
        "reason": "; ".join(outcome.reason for outcome in outcomes if outcome.reason),
        "parts_ms": {name: 1e3 * value for name, value in report.seconds.items()},
        "replica_ms": {
            name: 1e3 * max(outcome.seconds.get(name, 0.0) for outcome in outcomes)
            for name in {name for outcome in outcomes for name in outcome.seconds}
        },
    }


def main() -> None:
    """Serve commands until standard input ends."""
    case, target = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    answers, sys.stdout = sys.stdout, sys.stderr
    with TemporaryDirectory() as folder:
        backend = plugins.load_available(Backend, case["backend"])
        dist.init_process_group(
            backend.dist_backend, init_method=f"file://{folder}/group", rank=0, world_size=1
        )
        trainer = PushTrainer(Case(**case), Path(target))
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(trainer, command.pop("do"))(**command)
            print(json.dumps(answer), file=answers, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
