"""Settings with which no draft can follow a server are refused in one line."""

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("train.steps=5", "train.steps=5 with follow: it ends after a number of requests; set"),
        ("train.schedule=cosine", "train.schedule=cosine with follow: it has no last step"),
        ("placement.kind=disaggregated train.ranks=2", "train.ranks=2 with follow: it trains in one rank"),
        ("placement.kind=colocated train.restarts=1", "train.restarts=1 with follow"),
        ("data.eval_path=x.jsonl", "data.eval_path=x.jsonl with follow: it holds out requests; remove it"),
        ("follow.window=3", "follow.window=3"),
        ("engine.batch_tokens=16", "engine.batch_tokens=16 with follow is smaller than a request may be"),
        ("follow.servers=[127.0.0.1]", "is no address of a server"),
        ("follow.capture=serving", "data.path with follow.capture=serving: it has no engine of its own"),
        ("follow.capture=serving placement.kind=colocated", "kind=colocated with follow.capture"),
        ("follow.capture=serving follow.retention.rows=9", "retention.rows=9 with follow.capture"),
        ("follow.capture=serving follow.new_target=learn", "new_target=learn with follow.capture"),
    ],
)
def test_what_cannot_follow_is_refused_in_one_line(command_line, lab, tmp_path, words, problem) -> None:
    assert problem in command_line(*lab.follow("http://127.0.0.1:1", tmp_path / "run", *words.split())).error
    assert not (tmp_path / "run").exists()


def test_a_small_vocabulary_without_data_to_count_tokens_in_is_refused(command_line, lab, tmp_path) -> None:
    words = lab.follow_anew("http://127.0.0.1:1", tmp_path / "run", "draft.vocab_size=50")
    assert "draft.vocab_size=50 with follow without data" in command_line(*words).error
    assert not (tmp_path / "run").exists()


def test_a_schedule_in_a_file_is_not_overridden_silently(command_line, lab, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("train: {schedule: cosine}\n")
    words = lab.follow("http://127.0.0.1:1", tmp_path / "run", "--config", tmp_path / "run.yaml")
    words.remove("train.schedule=constant")
    assert "train.schedule=cosine with follow: it has no last step" in command_line(*words).error


def test_without_a_secret_or_a_server_it_does_not_begin(command_line, lab, tmp_path, monkeypatch) -> None:
    words = lab.follow("http://127.0.0.1:1", tmp_path / "run")
    for given in (words, lab.follow_anew("http://127.0.0.1:1", tmp_path / "run")):
        server = given.index("--server")
        assert "it needs a server; give --server" in command_line(*given[:server], *given[server + 2 :]).error
    monkeypatch.delenv(DRAFT_TOKEN_VARIABLE)
    assert f"{DRAFT_TOKEN_VARIABLE} is not set" in command_line(*words).error


def test_servers_that_no_other_command_learns_from_are_refused(command_line, lab, tmp_path) -> None:
    words = [*lab.words(), f"data.path={lab.rows('old')}", f"output={tmp_path / 'run'}"]
    error = command_line("plan", *words, "follow.servers=[http://127.0.0.1:1]").error
    assert "only spec-trainer follow learns from servers" in error
