"""The traffic of a vLLM changes from one domain of text to another, prose and code say, and a draft follows it.

Each change has the same with a server of engine hf: ``tests/integration/follow/``.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from spec_core.records import AcceptanceCounters, SamplingParams
from spec_engine_vllm.server_counters import vllm_counters
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_trainer.cli import app as cli

from .. import two_domains
from ..integration import draft_server, launching, run_directory
from ..prose_and_code import WORDS, ProseAndCode
from ..two_domains import Lab, Regained
from .test_vllm_follow import ask
from .user_server import Server
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.xdist_group("domains"), pytest.mark.timeout(3600)]

NUM_CLIENTS = 8
NUM_TOKENS = 20
NUM_HELD_OUT = 192
PORTION = 100
"""Requests of one domain: enough for a cycle of ``follow``."""
WINDOW = 384
"""Held-out requests by which drafts are judged: enough to notice that a draft saves 3 % of the verifications."""
ROUNDING = 1e-4
"""Two logits that differ by less are equally good."""


class Session:
    """All requests to a server, each of which has to succeed."""

    def __init__(self, server: Server, lab: Lab) -> None:
        self._server, self._lab = server, lab
        self.answered: set[tuple[int, ...]] = set()
        """Tokens of prompts, each with an answer."""

    def ask(self, prompts: list[list[int]], learn: str = "") -> None:
        """Ask by several clients at once."""
        sampling = {"max_tokens": NUM_TOKENS}
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            asked = [clients.submit(ask, self._server.port, one, learn, sampling=sampling) for one in prompts]
            for prompt, answer in zip(prompts, asked, strict=True):
                self.answered.add((*prompt, *answer.result()))

    def acceptance_length(self, domain: str) -> float:
        """Return what vLLM counts while it answers held-out prompts, from which nothing is learnt."""
        before = self._counted()
        self.ask(self._lab.prompts(domain, NUM_HELD_OUT, 2), "no")
        return (self._counted() - before).acceptance_length

    def acceptance_lengths(self) -> dict[str, float]:
        return {domain: self.acceptance_length(domain) for domain in ("old", "new")}

    def _counted(self) -> AcceptanceCounters:
        _, _, page = self._server.ask("GET", "/metrics")
        counters = vllm_counters(page.decode())
        assert counters is not None
        return counters.acceptance or AcceptanceCounters()


@pytest.fixture
def lab(texts, make_target, tmp_path) -> Iterator[Lab]:
    if texts == "prose and code":
        prose_and_code = ProseAndCode()
        target, prompts, rest = prose_and_code.target, prose_and_code.prompts, (WORDS, 400)
    else:
        target, prompts, rest = tmp_path / "target", two_domains.prompts, ()
        two_domains.save_target(
            make_target("llama", num_hidden_layers=4, hidden_size=64, head_dim=32), target
        )
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop_at_eos=False)
    with draft_server.new_engine(target) as engine:

        def answers(asked: list[list[int]]) -> list[list[int]]:
            return draft_server.tokens(engine.generate(asked, sampling))

        yield Lab(tmp_path, target, prompts, answers, *rest)


@pytest.fixture
def server(vllm_environment, lab, tmp_path, vllm_context, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')
    (tmp_path / "server").mkdir()
    server = Server(lab.target, lab.draft("old"), lab.draft("new"), tmp_path / "server")
    try:
        server.wait_ready(vllm_context.start_s)
        monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(("texts", "num_new"), [("successors", 4), ("prose and code", 20)])
def test_a_draft_regains_what_a_change_of_traffic_has_cost_and_keeps_the_rest(
    lab, server, tmp_path, num_new
) -> None:
    """Clients go on to ask while it trains and drafts are exchanged; every answer is the target's own."""
    session, output, log = Session(server, lab), tmp_path / "run", tmp_path / "log"
    before = session.acceptance_lengths()
    prompts = [*lab.prompts("old", PORTION, 3), *lab.prompts("new", num_new * PORTION, 3)]
    keys = [f"follow.requests={len(prompts)}", f"follow.every={PORTION // 2}", "follow.held_out=0.25"]
    keys.append(f"follow.window={WINDOW}")
    with launching.running(lab.follow(server.url, output, *keys), log) as follow:
        launching.until((output / "decoded" / "draft-0").exists)
        for start in range(0, len(prompts), PORTION):
            portion = prompts[start : start + PORTION]
            session.ask(portion)
            is_last = start + PORTION == len(prompts)
            while follow.poll() is None and (is_last or learnt(output) <= start):
                session.ask(portion[:NUM_CLIENTS], "no")
                time.sleep(draft_server.PAUSE_S)
        assert follow.returncode == 0, log.read_text()
    after = session.acceptance_lengths()
    push = ["--draft-model", str(lab.draft("new")), "--target", str(lab.target), "--to", server.url]
    assert cli.run(["push", *push]) == 0
    regained = Regained(before, after, session.acceptance_length("new"))
    print(regained, f"regained {regained.share:.3f}, kept {regained.kept:.3f}")
    regained.check()
    assert below_the_best(lab.target, session.answered) < ROUNDING
    summary = run_directory.summary(output)
    assert (summary["requests"], list(summary["left_out"])) == (len(prompts), ["opted_out"])


def learnt(output: Path) -> int:
    """Return the number of requests that had come before the newest step."""
    rows = run_directory.metrics(output) if (output / "metrics.jsonl").exists() else []
    return rows[-1]["requests"] if rows else 0


@torch.no_grad()
def below_the_best(target: Path, answered: set[tuple[int, ...]]) -> float:
    """Return the most by which the logit of a token of an answer is below the target's best one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    most = 0.0
    for tokens_BT in torch.tensor(sorted(answered)).split(64):
        logits_BTV = model(tokens_BT).logits[:, -NUM_TOKENS - 1 : -1]
        chosen_BT = logits_BTV.gather(-1, tokens_BT[:, -NUM_TOKENS:, None])[..., 0]
        most = max(most, (logits_BTV.amax(-1) - chosen_BT).max().item())
    return most
