"""The commands of README.md and docs/serve.md, as a newcomer runs them: from a target and questions to a draft that a
real vLLM serves, and whose guesses it accepts."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..free_port import free_port
from .page_server import ServerProcess
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("walk"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LEARN = "train.steps=100 train.lr=8e-3 train.global_batch_tokens=1024 draft.num_steps=3 draft.intermediate_size=256"
"""Words for a target of eight layers of width 64 and 64 conversations."""
LIMIT_S = 400


def line_of(page: str, *parts: str) -> str:
    """Return the one command of the page's shell blocks that has these parts."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "\n".join(block.replace("\\\n", " ") for block in blocks).splitlines()
    (line,) = [line for line in lines if all(part in line for part in parts)]
    return line.partition(" #")[0].strip()


class Shell:
    """The newcomer's shell, in the environment that has the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, line: str) -> str:
        """Return what the command prints; it has to succeed."""
        done = subprocess.run(
            ["bash", "-euc", f'export PATH="{Path(sys.executable).parent}:$PATH"\n{line}'],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(llama, tmp_path_factory) -> Shell:
    """A folder with a target, and conversations whose answers the target has given."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/target").symlink_to(llama)
    questions = [{"messages": [{"role": "user", "content": f"def add{n}(a, b):"}]} for n in range(64)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    shell = Shell(folder)
    shell.run(
        "spec-trainer regenerate --target path/to/target --data questions.jsonl --output chats.jsonl "
        "--max-new-tokens 80 --temperature 0"
    )
    return shell


@pytest.fixture(scope="module")
def trained(shell) -> str:
    """Return the lines that the README's ``train`` has printed."""
    shell.run(f"{line_of('README.md', 'spec-trainer plan')} {LEARN}")
    return shell.run(f"{line_of('README.md', 'spec-trainer train')} {LEARN}")


@pytest.fixture(scope="module")
def server(vllm_environment, trained, shell) -> Iterator[ServerProcess]:
    """vLLM, started by the page's command for CPUs."""
    port = free_port()
    line = line_of("docs/serve.md", "api_server", '"eagle3"')
    flags = f"--port {port} --max-model-len 200 --kv-cache-memory-bytes 64M"
    server = ServerProcess(f"{line} {flags}", shell.folder, port)
    try:
        server.wait_ready(LIMIT_S)
        yield server
    finally:
        server.close()


def test_a_run_ends_with_the_command_that_the_page_serves_it_by(trained):
    """Both start the module of vLLM's build for CPUs; how many tokens are guessed is each one's own choice."""
    said = shlex.split(trained.partition("serve it with vllm:\n")[2].strip())
    page = shlex.split(line_of("docs/serve.md", "api_server", '"eagle3"'))
    said_draft, page_draft = json.loads(said.pop()), json.loads(page.pop())
    assert sorted(Path(word).name for word in said) == sorted(Path(word).name for word in page)
    assert said_draft | {"num_speculative_tokens": 3} == page_draft


def test_the_answer_by_curl_is_made_of_accepted_guesses(server, shell):
    port = f"127.0.0.1:{server.port}"
    ask = line_of("docs/serve.md", "curl", "/v1/completions").replace("127.0.0.1:8000", port)
    answer = json.loads(shell.run(ask))
    assert answer["usage"]["completion_tokens"] > 1
    counters = shell.run(line_of("docs/serve.md", "curl", "/metrics").replace("127.0.0.1:8000", port))
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", counters, re.MULTILINE)
    assert float(accepted[1]) > 0
