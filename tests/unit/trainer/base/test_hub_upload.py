"""A folder goes to the hub as one commit; what forbids that is said in one line, before the export if possible."""

import base64
import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spec_core.errors import ConfigError, RunError
from spec_trainer.base.hub import check_upload, upload_folder

# The hub's client makes its storage protocol's requests by a deprecated argument of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_secret"


class Hub:
    """Hub records the repositories and files that a stand-in for the hub was sent; a full one refuses commits."""

    def __init__(self) -> None:
        self.created: list[dict] = []
        self.files: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.stored: dict[str, bytes] = {}
        self.is_full = False
        self.may_answer = threading.Event()
        """Whether requests are answered; until then they wait."""
        self.may_answer.set()
        self.url = ""


class Routes(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.may_answer.wait()
        if self.path != "/api/whoami-v2":
            self._send(404, {"error": "not found"})
        elif self.headers["Authorization"] == f"Bearer {TOKEN}":
            self._send(200, {"name": "me", "type": "user"})
        else:
            self._send(401, {"error": "Invalid username or password."})

    def do_PUT(self) -> None:
        self.hub.stored[self.path.rpartition("/")[2]] = self._body()
        self._send(200, {})

    def do_POST(self) -> None:
        self.hub.may_answer.wait()
        body = self._body()
        if self.path == "/api/repos/create":
            fields = json.loads(body)
            exists = fields in self.hub.created
            self.hub.created.append(fields)
            self._send(409 if exists else 200, {"url": f"{self.hub.url}/me/draft", "name": "me/draft"})
        elif self.path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif self.path == "/api/models/me/draft/preupload/main":
            modes = [
                {"path": file["path"], "shouldIgnore": False, "uploadMode": self._mode(file["path"])}
                for file in json.loads(body)["files"]
            ]
            self._send(200, {"files": modes})
        elif self.path == "/me/draft.git/info/lfs/objects/batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.hub.url}/storage/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif self.path == "/api/models/me/draft/commit/main":
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._send(404, {"error": "not found"})

    def _commit(self, lines: list[dict]) -> None:
        if self.hub.is_full:
            self._send(403, {"error": "Storage limit reached"})
            return
        for line in lines:
            value, files = line["value"], self.hub.files["me/draft"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        self._send(200, {"commitUrl": f"{self.hub.url}/me/draft/commit/1", "commitOid": "1", "success": True})

    def log_message(self, *args: object) -> None: ...

    @staticmethod
    def _mode(path: str) -> str:
        return "lfs" if path.endswith(".safetensors") else "regular"

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):  # chunked
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, code: int, fields: dict) -> None:
        text = json.dumps(fields).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch):
    """The hub that this process asks, with the token of its user."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnRoutes", (Routes,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # The hub's other protocol is a compiled library's own.
    for module in ("_commit_api", "hf_api"):
        monkeypatch.setattr(f"huggingface_hub.{module}.is_xet_available", lambda: False)
    yield hub
    hub.may_answer.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags:\n- eagle3\n---\nA draft.\n")
    (folder / "config.json").write_text("{}\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    return folder


def test_the_hub_has_every_file_of_the_folder_in_a_private_repository(hub, folder):
    check_upload("me/draft")
    assert upload_folder(folder, "me/draft") == f"{hub.url}/me/draft"
    assert hub.files == {"me/draft": {path.name: path.read_bytes() for path in folder.iterdir()}}
    assert [fields["visibility"] for fields in hub.created] == ["private"]


def test_a_repository_that_exists_gets_a_further_commit(hub, folder):
    upload_folder(folder, "me/draft")
    (folder / "config.json").write_text('{"a": 1}\n')
    upload_folder(folder, "me/draft")
    assert hub.files["me/draft"]["config.json"] == b'{"a": 1}\n'


def test_a_hub_that_refuses_the_commit_is_an_error_that_says_what_is_left(hub, folder):
    """The command for another try makes no public repository."""
    hub.is_full = True
    folder = folder.rename(folder.with_name("my draft"))
    with pytest.raises(
        RunError,
        match=r"is written, but me/draft did not get it: .*hf upload --private me/draft '.*/my draft'\Z",
    ) as raised:
        upload_folder(folder, "me/draft")
    assert "\n" not in str(raised.value)
    assert hub.files == {}


@pytest.mark.parametrize("name", ["draft", "a/b/c", "me/draft.git", ""])
def test_what_is_no_name_of_a_repository_is_refused_unasked(hub, name):
    with pytest.raises(ConfigError, match=r"--push-to-hub=.*: a name of the hub is owner/name"):
        check_upload(name)


def test_without_a_token_or_with_a_wrong_one_nothing_is_exported(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"--push-to-hub=me/draft: the hub at .* refuses: ") as raised:
        check_upload("me/draft")
    assert "\n" not in str(raised.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="log in with `hf auth login`, or set HF_TOKEN"):
        check_upload("me/draft")


def test_without_a_network_it_is_said(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="does not answer as one"):
        check_upload("me/draft")


def test_a_hub_that_never_answers_is_not_waited_for(hub, folder, monkeypatch):
    for limit in ("_ASK_S", "_TAKE_S"):
        monkeypatch.setattr(f"spec_trainer.base.hub.{limit}", 0.2)
    hub.may_answer.clear()
    with pytest.raises(ConfigError, match=r"--push-to-hub=me/draft: the hub at .* does not answer") as raised:
        check_upload("me/draft")
    assert "\n" not in str(raised.value)
    with pytest.raises(
        RunError, match=r"is written, but me/draft did not get it: the hub at .* does not answer"
    ):
        upload_folder(folder, "me/draft")
