"""A run whose processes are killed and stopped, and whose files are damaged, at steps drawn from a seed."""

import json
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from . import run_directory
from .damage import Damage, RunFiles
from .launching import Lab, Run
from .leftovers import belongings
from .ray_nodes import RayNodes
from .run_directory import assert_bitwise_equal, assert_trained_exactly_once, last_step, losses

PEER_S = 5
KEPT_S = 30
"""Longest time in which everything must be gone after kill -9 of the run's own process."""
COMMAND_S = 300
"""Longest time for a command that nothing disturbs."""
WORKER = "spec_processes.worker_main"
LAST_STEPS = 20
"""Steps at the end without a fault: the last ones may come late."""
INLINE = {"kill run": 3, "damage files": 7}
"""Kind of fault -> how often it comes, relative to the others."""
KINDS = {**INLINE, "kill engine": 16, "stop engine": 6, "kill trainer": 4, "stop trainer": 1}
"""The same where there are workers. One that stops costs PEER_S."""
ON_NODES = {**KINDS, "kill raylet": 6}
NUM_SAMPLES = 44
"""Rows of ``write_rows``; what is held out lies in another file."""
NUM_NODES = 5
"""One for each worker, and one to move to."""
LEFT_ALONE = {".identity", ".lock"}
"""Hidden files that a run directory keeps."""


@dataclass
class Chaos:
    """One run with faults; the same command again where its own process was killed."""

    lab: Lab
    output: Path
    keys: dict[str, object]
    kinds: dict[str, int]
    draw: random.Random
    nodes: RayNodes | None = None
    """The cluster that it runs on; None for the launcher local."""
    faults: list[str] = field(default_factory=list)
    _next: str | None = None
    """Kind of the next fault, which comes as soon as somebody is ready; None to draw one."""
    _record: int = 0
    """Inode of metrics.jsonl when the newest command began: it has another one once the command trains."""
    _end: tuple[str, int] = ("", -1)
    """The run's words once the last fault that ends its workers has done so, and how often they came before."""
    _stopped: dict[int, float] = field(default_factory=dict)
    """Number of a fault that stopped an engine -> when."""
    _overtaken: set[int] = field(default_factory=set)
    """Faults whose worker nobody could miss, because another fault then ended all workers."""
    _gone: str | None = None
    """Address of the node whose raylet was killed last, until it is back."""

    def __post_init__(self) -> None:
        self.files = RunFiles(self.output, self.draw, self.lab.folder / "aside")

    def run(self, num_faults: int, steps: int) -> None:
        """Train to the end, with so many faults."""
        moments = sorted(self.draw.choices(range(1, steps - LAST_STEPS), k=num_faults))
        run = self._start()
        while (code := run.process.poll()) is None:
            left = moments[len(self.faults) :]
            due = bool(left) and (self._next is not None or last_step(self.output) >= left[0])
            if not self._ending(run):
                self._bring_back()
                if due and self._is_ready(run):
                    run = self._fault(run)
            time.sleep(0.05)
        assert code == 0, run.story()
        assert len(self.faults) >= num_faults, f"the run was done after {len(self.faults)} faults"
        self._damage_finished()

    def _start(self) -> Run:
        """Give the command, to resume from a whole checkpoint."""
        self._end, self._record = ("", -1), self._inode()
        word = self.files.resume_from()
        done_steps = self.files.step_of(word)
        run = self.lab.start(self.output, **self.keys, train__resume_from=word)
        if word != "latest":
            self._until_ready(run)
            if self._has_workers:
                assert run.resumed_from() == done_steps, run.story()
                # Before it writes the damaged step again.
                self._next = self.draw.choice(["kill trainer", None])
        return run

    def _fault(self, run: Run) -> Run:
        """Cause a fault of a kind that is drawn, if it has a victim; return the command that goes on."""
        (drawn,) = self.draw.choices(list(self.kinds), list(self.kinds.values()))
        kind, self._next = self._next or drawn, None
        what, whom = kind.split()
        if whom == "run":
            self._kill(run)
            self._note(kind)
            return self._start()
        if whom == "files":
            self._kill(run)
            return self._damage()
        fault = self._lose_host(run) if whom == "raylet" else self._hit_worker(run, what, whom)
        if fault is not None:
            self._note(fault)
        return run

    def _note(self, fault: str) -> None:
        self.faults.append(fault)
        print(f"{len(self.faults):3} {fault}", flush=True)

    def _hit_worker(self, run: Run, what: str, role: str) -> str | None:
        workers = ready_workers(run, self._processes(run), role)
        if not workers:
            return None
        victim = self.draw.choice(sorted(workers))
        if role == "trainer":
            self._overtake()
            self._expect(run, "the run begins again")
        elif what == "stop":
            self._stopped[len(self.faults)] = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            workers[victim].send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        return f"{what} {victim}"

    def _lose_host(self, run: Run) -> str | None:
        assert self.nodes is not None
        workers = ready_workers(run, self._processes(run), "")
        hosts = sorted({host for worker in workers.values() if (host := self._host_of(worker))})
        if not hosts:
            return None
        self._overtake()
        self._gone = self.draw.choice(hosts)
        self._expect(run, f"its host {self._gone} does not answer")
        self.nodes.kill_raylet(self._gone)
        return f"kill {self._gone}"

    def _overtake(self) -> None:
        now = time.monotonic()
        self._overtaken |= {number for number, when in self._stopped.items() if now - when < 2 * PEER_S}

    def _kill(self, run: Run) -> None:
        self._overtake()
        held = belongings(run)
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + KEPT_S
        while left := [*self._processes(run), *held.left()]:
            assert time.monotonic() < deadline, f"left {KEPT_S} s after kill -9: {left}"
            time.sleep(0.1)

    def _damage(self) -> Run:
        """Damage files, and see that a command names each; it is refused where the newest checkpoint is damaged."""
        found = self.files.damage()
        for damage in found:
            self._note(damage.name)
        self._remove_links(found)
        for damage in found:
            if damage.refused:
                refused = self._refused()
                assert damage.place in refused.last_line(), f"{damage.name} is not told\n{refused.story()}"
                assert "--resume-from previous" in refused.last_line(), refused.story()
        run = self._start()
        self._until_ready(run)
        told = [damage.place for damage in found if not damage.refused]
        run.until(lambda: all(place in run.errors.read_text() for place in told), COMMAND_S)
        return run

    def _damage_finished(self) -> None:
        """Damage what a finished run has written at its end: the same command writes it anew."""
        weights = run_directory.draft_weights(self.output)
        found = self.files.damage_products()
        for damage in found:
            self._note(damage.name)
        self._remove_links(found)
        run = self.lab.start(self.output, **self.keys)
        assert run.wait(COMMAND_S) == 0, run.story()
        assert run_directory.summary(self.output)["steps"] == last_step(self.output)
        assert run_directory.draft_weights(self.output) == weights
        assert "<svg" in (self.output / "report.html").read_text()

    def _remove_links(self, found: list[Damage]) -> None:
        """Remove each link once a command was refused that names it, and has changed nothing behind any."""
        links = {damage.link for damage in found if damage.link is not None}
        while links:
            refused = self._refused()
            (line,) = refused.errors.read_text().splitlines()
            named = [link for link in links if str(link) in line]
            assert named, f"none of {links} is told\n{refused.story()}"
            named[0].unlink()
            links.remove(named[0])

    def _refused(self) -> Run:
        """Give the command, which must end with exit code 2 and leave alone what is outside the run directory."""
        aside = self.files.contents_aside()
        run = self.lab.start(self.output, **self.keys)
        assert run.wait(COMMAND_S) == 2, run.story()
        assert "Traceback" not in run.errors.read_text(), run.story()
        assert self.files.contents_aside() == aside, f"{self.files.aside} was changed\n{run.story()}"
        return run

    def _expect(self, run: Run, words: str) -> None:
        self._end = (words, run.errors.read_text().count(words))

    def _ending(self, run: Run) -> bool:
        """Whether workers still end for the last fault: another one would have no part in that."""
        words, times = self._end
        return run.errors.read_text().count(words) <= times

    @property
    def _has_workers(self) -> bool:
        return "kill trainer" in self.kinds

    def _is_ready(self, run: Run) -> bool:
        """Whether the command trains by now."""
        if self._has_workers:
            return bool(ready_workers(run, self._processes(run), ""))
        return self._inode() != self._record and last_step(self.output) > 0

    def _until_ready(self, run: Run) -> None:
        run.until(lambda: self._is_ready(run), COMMAND_S)

    def _inode(self) -> int:
        metrics = self.output / "metrics.jsonl"
        return metrics.stat().st_ino if metrics.exists() else 0

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

    def check(self, quiet: Path, steps: int) -> str:
        """Compare with the quiet run, and look for the name and the cause of every fault; return what happened."""
        self.files.mend_records()
        assert_trained_exactly_once(self.output, range(NUM_SAMPLES))
        for step, (found, expected) in enumerate(zip(losses(self.output), losses(quiet), strict=True), 1):
            assert found == expected, f"loss {found} of step {step}, {expected} in the quiet run"
        assert_bitwise_equal(self.output, quiet, steps)
        hidden = {path.name for path in self.output.rglob(".*")} - LEFT_ALONE
        assert not hidden, f"left in the run directory: {hidden}"
        replacements = self.output / "logs" / "replacements.jsonl"
        lines = replacements.read_text().splitlines() if replacements.exists() else []
        causes = [json.loads(line)["cause"] for line in lines]
        said = [line for run in self.lab.runs for line in run.errors.read_text().splitlines()]
        named = [line for line in said if "the run begins again at " in line]
        for number, fault in enumerate(self.faults):
            if number not in self._overtaken:
                self._check_told(fault, [*causes, *named])
        return f"{len(causes)} engines replaced, {len(named)} restarts, {len(self.lab.runs) - 1} commands"

    def _check_told(self, fault: str, told: list[str]) -> None:
        """Look for a fault of a worker or a host; one of files was told at once, kill -9 of the run needs no word."""
        what, victim, *_ = fault.split()
        worker = victim.startswith(("engine-", "trainer-"))
        words = "" if not worker else "silent" if what == "stop" else "was"
        if worker or (what == "kill" and victim != "run"):
            assert any(victim in one and words in one for one in told), f"{fault} is not in {told}"


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
