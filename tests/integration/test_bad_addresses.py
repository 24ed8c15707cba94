"""Addresses, secrets and folders of servers that are no use: exit code 2, and one line that says what to do."""

import socket

import pytest


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["push.address=here"], "servers cannot connect to 'here': 'here' is not host:port"),
        (["push.address=127.0.0.1:70000"], "the highest port is 65535"),
        (["push.transport=[pigeon]"], "no weight_transport plugin is called 'pigeon'"),
        (["push.transport=[ipc]", "push.folder=x"], "no weight transport among ipc has the option folder"),
        (["push.options.file.kep=5"], "unknown key 'push.options.file.kep' (did you mean 'keep'?)"),
        (["push.options.file.keep=many"], "push.options.file.keep='many': Input should be a valid integer"),
        (["push.options.fil.keep=5"], "no weight_transport plugin is called 'fil' (did you mean 'file'?)"),
        (["push.options.file=5"], "push.options.file=5"),
        (
            ["push.options.file.keep=5", "push.transport=[ipc]"],
            "weight transport 'file' has options, but only ipc may be used; remove its options, or name it too",
        ),
        (["push.bucket_bytes=1"], "push.bucket_bytes=1: Input should be greater than or equal to 4096"),
        ([], "environment variable SPEC_DRAFT_TOKEN is not set"),
    ],
)
def test_a_plan_of_pushes_that_cannot_work_is_refused(refused, words, line, monkeypatch):
    monkeypatch.delenv("SPEC_DRAFT_TOKEN", raising=False)
    assert line in refused("train.push_every=5", "push.to=[http://127.0.0.1:1]", *words, command="plan")


def test_a_plan_of_pushes_with_a_secret_or_folder_of_no_use_is_refused(refused, tmp_path, monkeypatch):
    pushes = ["train.push_every=5", "push.to=[http://127.0.0.1:1]"]
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "two\nlines")
    assert refused(*pushes, command="plan").endswith("without spaces at its ends (SPEC_DRAFT_TOKEN)")
    taken = tmp_path / "file"
    taken.touch()
    for key in ("push.folder", "push.options.file.folder"):
        line = refused(*pushes, f"{key}={taken}/versions", command="plan")
        assert line.startswith(f"folder for weights {taken}/versions: {taken} is not a folder")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_port_that_another_program_uses(refused, monkeypatch, command):
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "x" * 40)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(
            "train.push_every=5", "push.to=[http://127.0.0.1:1]", f"push.address=127.0.0.1:{port}",
            command=command,
        )  # fmt: skip
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line
