"""A third party's weight transport carries a push to a server, from wheels, without a changed line here."""

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVER = Path(__file__).parents[1] / "integration" / "draft_server.py"
TOKEN = "the secret of the test"


@contextmanager
def serving(python, target, draft):
    """Yield the address of a server that runs in the clean environment."""
    words = [str(word) for word in (python, SERVER, target, draft)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


def test_a_third_partys_weight_transport_carries_a_push(
    train, run, clean_python, tiny_llama, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", TOKEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command, draft = clean_python.with_name("spec-trainer"), train("train.steps=1") / "draft"
    with serving(clean_python, tiny_llama, draft) as url:
        own = ["push.options.socket.host=127.0.0.2", "push.options.socket.bucket_bytes=4096"]
        words = ["--target", tiny_llama, "--draft-model", draft, "--to", url, "--json"]
        document = json.loads(run(command, "push", *own, "--transport", "socket", *words, cwd=tmp_path))
        assert document["committed"]
        assert document["servers"][url]["transport"] == "socket"
        with pytest.raises(
            AssertionError, match=r"unknown key 'push.options.socket.hots' \(did you mean 'host'\?\)"
        ):
            run(command, "push", "push.options.socket.hots=127.0.0.1", *words, cwd=tmp_path)
