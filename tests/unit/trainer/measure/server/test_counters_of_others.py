"""A stranger's Serving whose counters fail, or lack a field, is named by whoever reads a server's metrics."""

import json
import sys

import pytest

from spec_trainer.cli.app import run
from spec_trainer.live.latency_budget import LatencyBudget

from .....distributions import write_distribution
from .streaming_server import streaming

MODULE = """
import math
from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters, ServerCounters
from spec_engine_hf.engine import HfEngine
from spec_engine_vllm.serving import VllmServing

class AilingServing(VllmServing):
    def counters(self, metrics):
        if {page!r} in metrics:
            {statement}

class Ailing(HfEngine):
    name = "ailing"
    serving = AilingServing()
"""
EVERY_PAGE, ITS_OWN = "", "ailing:"
OF_PAIRS = "expected a tuple of pairs (upper bound in seconds, number of latencies up to it), both ascending"
A_COUNT = "an integer from 0 to 9007199254740992"
FAILURES = {
    "raise KeyError('mine')": "KeyError: 'mine'",
    "raise SystemExit(3)": "SystemExit: 3",
    "raise EngineError('not today')": "not today",
    "return {'generated_tokens': 3}": "TypeError: it returned dict, expected ServerCounters or None",
    "return ServerCounters()": "TypeError: ServerCounters.__init__() missing 1 required keyword-only argument: "
    "'generated_tokens'",
    "return object.__new__(ServerCounters)":
        "AttributeError: 'ServerCounters' object has no attribute 'generated_tokens'",
    "return ServerCounters(generated_tokens=3.5)": f"generated_tokens=3.5, expected {A_COUNT}",
    "return ServerCounters(generated_tokens=3, cached_tokens=10**40)": f"cached_tokens={10**40}, expected {A_COUNT}",
    "return ServerCounters(generated_tokens=3, acceptance=0.5)":
        "acceptance=0.5, expected AcceptanceCounters or None",
    "return ServerCounters(generated_tokens=3, acceptance=AcceptanceCounters(rounds=-1))":
        f"acceptance.rounds=-1, expected {A_COUNT}",
    "return ServerCounters(generated_tokens=3, acceptance=AcceptanceCounters(accepted_per_position=(1, None)))":
        f"acceptance.accepted_per_position=(1, None), expected a tuple with, per position, {A_COUNT}",
    "return ServerCounters(generated_tokens=3, inter_token_latency=None)": f"inter_token_latency=None, {OF_PAIRS}",
    "return ServerCounters(generated_tokens=3, inter_token_latency=((1, 5), (0.1, 9)))":
        f"inter_token_latency=((1, 5), (0.1, 9)), {OF_PAIRS}",
    "return ServerCounters(generated_tokens=3, inter_token_latency=((math.nan, 5),))":
        f"inter_token_latency=((nan, 5),), {OF_PAIRS}",
}  # fmt: skip


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(statement, page)``: install the stranger's engine; it runs ``statement`` for pages with ``page``."""

    def install(statement: str, page: str) -> None:
        points = "[spec_core.engines]\nailing = ailing_engine:Ailing\n"
        site = write_distribution(tmp_path / "site", "ailing", points)
        (site / "ailing_engine.py").write_text(MODULE.format(page=page, statement=statement))
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "ailing_engine", raising=False)

    return install


@pytest.fixture
def evaluate(tmp_path, capfd, monkeypatch):
    """``evaluate(url)``: exit code, standard output, and the last line of standard error."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "Once upon"}\n')

    def evaluate(url: str) -> tuple[int, str, str]:
        code = run(["evaluate", "--server", url, "--prompts", str(file), "--json"])
        out, err = capfd.readouterr()
        return code, out, (err.strip().splitlines() or [""])[-1]

    return evaluate


@pytest.mark.parametrize("statement", FAILURES)
def test_the_plugin_and_its_field_are_named(install, evaluate, statement):
    install(statement, ITS_OWN)
    with streaming(engine="ailing") as (url, _):
        code, _, error = evaluate(url)
    problem = f"engine 'ailing' (ailing 1.0) cannot read the metrics of {url}: {FAILURES[statement]}"
    assert (code, error) == (2, f"spec-trainer: error: {problem}")


@pytest.mark.parametrize("statement", list(FAILURES)[:4])
def test_it_is_warned_of_where_another_engine_reads_the_metrics(install, evaluate, caplog, statement):
    install(statement, EVERY_PAGE)
    with streaming() as (url, _):
        code, out, _ = evaluate(url)
    assert (code, json.loads(out)["engine"]) == (0, "vllm")
    (warning,) = {record.getMessage() for record in caplog.records if "ailing" in record.getMessage()}
    assert warning == (
        f"engine 'ailing' (ailing 1.0) cannot read the metrics of {url}: {FAILURES[statement]}; engine 'vllm' can"
    )


def test_counters_that_fail_in_the_middle_end_the_command(install, evaluate):
    """The first reading, which finds the engine, succeeds."""
    count = "self.read = getattr(self, 'read', 0) + 1"
    install(f"{count}; return ServerCounters(generated_tokens=3 // (2 - self.read))", ITS_OWN)
    with streaming(engine="ailing") as (url, _):
        code, _, error = evaluate(url)
    assert code == 2
    assert error.startswith(
        f"spec-trainer: error: engine 'ailing' (ailing 1.0) cannot read the metrics of {url}: Zero"
    )


def test_a_budget_of_latency_names_it_once_and_does_not_hold_training(install, caplog):
    statement = "return ServerCounters(generated_tokens=3, inter_token_latency=None)"
    install(statement, ITS_OWN)
    with streaming(engine="ailing") as (url, _):
        budget = LatencyBudget([url], 20.0, every_s=0.0)
        for _ in range(3):
            budget.wait(lambda: False, lambda seconds: None)
    (warning,) = [record.getMessage() for record in caplog.records if "ailing" in record.getMessage()]
    named = f"engine 'ailing' (ailing 1.0) cannot read the metrics of {url}: {FAILURES[statement]}"
    assert (warning, budget.waited_s) == (f"follow.latency_budget_ms: {named}", 0.0)
