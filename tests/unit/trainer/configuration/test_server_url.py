"""Each server is named once, however its address is written."""

import pytest

from spec_core.errors import ConfigError
from spec_trainer.cli.app import run
from spec_trainer.configuration.server_url import check_distinct


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "http://localhost:8000/"),
        ("http://LOCALHOST:8000", "http://0.0.0.0:8000"),
        ("http://a.b", "HTTP://A.b.:80//"),
        ("https://a.b/c", "https://a.b:443/c/"),
        ("http://[::1]:8000", "http://[::]:8000"),
    ],
)
def test_two_spellings_of_one_server_are_refused(one, other):
    with pytest.raises(ConfigError) as refused:
        check_distinct(["http://c:1", one, other])
    assert str(refused.value) == f"{one!r} and {other!r} are the same server; name each once"


def test_servers_that_may_differ_are_taken():
    check_distinct(
        ["http://a:1", "http://a:2", "https://a:1", "http://a:1/x", "http://127.0.0.1:1", "http://[::1]:1"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ["follow", "--target", "t", "--server", "http://a:1", "http://a:1/"],
        ["train", "--target", "t", "--data", "d", "push.to=[http://a:1,http://A:1]"],
        ["serving", "--of", "http://a:1", "--of", "http://a:1"],
    ],
)
def test_every_command_refuses_a_server_that_is_named_twice(words, monkeypatch, capsys):
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "x")
    assert run(words) == 2
    line = capsys.readouterr().err
    assert line.startswith("spec-trainer: error: ")
    assert "are the same server; name each once" in line
