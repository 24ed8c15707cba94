"""A name may be a folder's or one of the hub; what it cannot be is said without asking, and the hub is asked once."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spec_core.errors import DataError, TargetError
from spec_trainer.base import hub
from spec_trainer.base.hub import hub_problem, is_hub_name, resolve_target
from spec_trainer.data.sources import source_files

NO_HUB_NAMES = [
    "./nothing", "../nothing", "/nothing", "~/nothing", "nothing", "a/b/c", "a/b/", "a//b", "a/b.git", "a/-b",
    "a/b c", "a/b?", "a/..", "a/" + "b" * 97, "x" * 5_000, "a/b\nc", "ü/b",
]  # fmt: skip


@pytest.fixture
def hub_that(monkeypatch):
    """``hub_that(answers)``: a hub on this host whose every answer begins so; it is asked for half a second."""
    servers = []

    def start(answer):
        class Hub(BaseHTTPRequestHandler):
            def do_GET(self):
                answer(self)

            do_HEAD = do_GET

            def log_message(self, *args): ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(hub, "_ASK_S", 0.5)
        return address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def says(code, **headers):
    def answer(request):
        request.send_response(code)
        for name, value in {"Content-Length": "0", **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return answer


@pytest.mark.parametrize("name", NO_HUB_NAMES)
def test_what_cannot_be_a_hubs_name_is_no_folder(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spec_trainer.base.hub.hub_problem", None)
    monkeypatch.setattr("spec_trainer.data.sources.hub_problem", None)
    assert not is_hub_name(name)
    with pytest.raises(
        TargetError, match=r"is not a folder: there is none of that name; a name of the hub is owner"
    ):
        resolve_target(name)
    with pytest.raises(DataError, match=r"does not exist: expected .* or a hub id owner/name\[:split\]"):
        source_files(name)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says(404, X_Error_Code="RepoNotFound"), "the hub has no such model, or it is private: log in with"),
        (says(403, X_Error_Code="GatedRepo"), "it is gated: ask for access"),
        (says(401), "refuses: HfHubHTTPError: Client error '401 Unauthorized'"),
        (says(503), "refuses: HfHubHTTPError: Server error '503"),
        (says(200), "does not answer as one"),
        (
            lambda request: time.sleep(5),
            "does not answer as one (ReadTimeout: timed out); see to the network",
        ),
    ],
    ids=["absent", "gated", "refused", "down", "no hub", "silent"],
)
def test_the_hubs_reason_is_said_beside_the_missing_folder(hub_that, answer, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub_that(answer)
    assert reason in hub_problem("owner/name", "model")
    start = time.monotonic()
    with pytest.raises(TargetError, match="neither a folder nor a model that the hub gives") as raised:
        resolve_target("owner/name")
    assert f"there is no such folder, and {hub_problem('owner/name', 'model')}" in str(raised.value)
    assert time.monotonic() - start < 4
    with pytest.raises(
        DataError, match="'owner/name:test' cannot be read: there is no such file or folder, and "
    ):
        source_files("owner/name:test")


def test_offline_nothing_is_asked():
    with pytest.raises(TargetError, match="there is no such folder, and HF_HUB_OFFLINE forbids asking"):
        resolve_target("nobody/nothing")


def test_a_folder_of_a_hubs_shape_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_target("owner/name").is_dir()
    assert resolve_target("~/owner") == tmp_path / "owner"
