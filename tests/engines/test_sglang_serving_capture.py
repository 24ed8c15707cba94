"""An SGLang captures the states of the requests that it serves; a draft learns from them without a second target."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from .page_server import PageServer, shell_block
from .served_states import NUM_TOKENS, answered, assert_states_of_live_requests, follow_by_kept_states
from .sglang_here import ARGS, needs_sglang

pytestmark = [
    *needs_sglang,
    pytest.mark.slow,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang states"),
    pytest.mark.timeout(1200),
]

START_S = 400.0
CHUNK = 64
OWN = ("warm_up", "no_http")
"""Causes by which SGLang's own requests are counted."""
SETTING = {"share": 1.0, "states_bytes": 64 << 20}


@pytest.fixture
def start_server(sglang_environment, tmp_path, monkeypatch) -> Iterator[Callable[..., PageServer]]:
    """Starts the page's command with a prefix cache, prompts in chunks, and a retraction in every 20 passes."""
    servers: list[PageServer] = []
    here = {
        **{name: value for name, value in ARGS.items() if name != "disable_radix_cache"},
        "dtype": "float32",
        "chunked-prefill-size": CHUNK,
    }
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, json.dumps(SETTING))
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")

    def start(target: Path, draft: Path) -> PageServer:
        command = shell_block("sglang.launch_server")
        servers.append(PageServer(command, tmp_path, target, draft, draft, here))
        servers[-1].wait_ready(START_S)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(server: PageServer, prompt: list[int], leaves: bool = False) -> list[int] | None:
    sampling = {"max_new_tokens": 90 if leaves else NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    asked = {"input_ids": prompt, "sampling_params": sampling}
    patience_s = 0.05 if leaves else 240.0
    return answered(server.port, "/generate", asked, lambda answer: answer["output_ids"], patience_s)


def test_states_of_live_requests_are_those_of_a_fresh_prefill(start_server, trained_draft) -> None:
    trained = trained_draft("eagle3")
    server = start_server(trained.target, trained.folder)
    assert_states_of_live_requests(server, trained, ask, CHUNK, OWN)
    assert sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log.read_text()))) > 0


def test_a_draft_follows_without_a_second_target(
    start_server, repeating, untrained, tmp_path, monkeypatch
) -> None:
    server = start_server(repeating, untrained)
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
    _, _, left_out = follow_by_kept_states(server, repeating, untrained, ask, tmp_path / "run")
    assert left_out <= {"prefix_hit", "same_prompt", "hole", *OWN}
