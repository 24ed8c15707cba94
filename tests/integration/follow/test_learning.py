"""A draft follows the traffic of a server: what it learns, in one process and in several."""

import random

import pytest

from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_trainer.cli import app as cli

from ...two_domains import Regained, prompts
from .. import draft_server, live_server, run_directory
from .conftest import TOO_LARGE
from .traces import CANARY, files, is_said

CAPTURING = '{"share": 1.0, "states_bytes": 67108864}'
"""``SPEC_LIVE_REQUESTS`` of a server that captures states."""


@pytest.mark.slow
def test_it_regains_what_a_change_of_traffic_has_cost_and_keeps_the_rest(lab, url, tmp_path, capsys) -> None:
    before = lab.acceptance_lengths(lab.draft("old"))
    output = tmp_path / "run"
    for part in range(2):  # the same command goes on, from the checkpoint before
        for domain, num in (("old", 40), ("new", 160)):
            asked = prompts(domain, num, 10 + part)
            assert live_server.ask(url, asked)["answers"] == lab.answers(asked)
        assert cli.run(lab.follow(url, output, "follow.requests=200")) == 0

    first, second = run_directory.versions(output)
    assert (first["parent"], first["served"], first["version"]) == (0, first["step"], 1)
    assert (second["parent"], second["acceptance_length_start"] < second["acceptance_length_served"]) == (
        first["step"],
        True,
    )
    trained = lab.acceptance_length(lab.draft("new"), "new")
    Regained(before, lab.acceptance_lengths(output / "draft"), trained).check()
    answered = live_server.ask(url, prompts("new", 3, 20))
    assert answered["versions"] == [second["version"]] * 3
    assert answered["answers"] == lab.answers(prompts("new", 3, 20))
    summary = run_directory.summary(output)
    assert (summary["served_step"], summary["served_version"]) == (second["served"], second["version"])
    assert "Drafts judged on live requests" in (output / "report.html").read_text()
    assert cli.run(["serving", "--of", url, "--history", str(output)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  other: ")]
    assert f"  version {second['version']}  " in said[-3]
    for line, row, data in zip(said[-2:], (first, second), ("0 to 200", "0 to 200"), strict=True):
        assert (
            f"pushed: version {row['version']}, of step {row['step']}  parent: step {row['parent']}" in line
        )
        assert f"requests {data}  tau {row['acceptance_length']:.2f}" in line
    notes = run_directory.metrics(output)[-1]
    assert (notes["serving_version"], notes["requests"]) == (1, 200)


def test_it_learns_from_requests_by_label_and_route(lab, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0, "labels": ["code", "chat"]}')
    output = tmp_path / "run"
    with live_server.serving(lab.target, lab.draft("old")) as url:
        push = ["push", "--draft-model", str(lab.draft("old")), "--target", str(lab.target), "--to", url]
        assert cli.run(push) == 0
        live_server.ask(url, prompts("new", 60, 26), **{"x-draft-label": "code"})
        live_server.ask(url, prompts("old", 60, 27), "/v1/completions")
        for number in range(40):
            live_server.ask(url, prompts("new", 1, 100 + number), **{"x-draft-label": f"secret-{number}"})
        words = lab.follow_anew(url, output, "--draft-model", lab.draft("old"), "follow.requests=160")
        assert cli.run(words) == 0
        assert cli.run(["serving", "--of", url, "--history", str(output)]) == 0
    said = capsys.readouterr().out
    (row,) = run_directory.versions(output)
    assert row["acceptance_length"] > row["acceptance_length_start"]
    assert (row["served"], row["version"]) == (row["step"], 2)
    steps = run_directory.metrics(output)
    assert {step["serving_version"] for step in steps} == {1}, "what the servers had been given before"
    assert run_directory.summary(output)["steps"] == steps[-1]["step"]
    same = run_directory.summary(output)["left_out"].get("same_prompt", 0)
    samples = sum(step["samples"] for step in run_directory.metrics(output))
    assert samples == 160 - row["held_out"] - same, "every one is a request, none is replayed"
    labels = row["labels"]
    assert sorted(labels) == ["/v1/completions", "code", "other"]
    assert sum(one["held_out"] for one in labels.values()) == row["held_out"]
    served = {label: one["acceptance_length_served"] for label, one in labels.items()}
    assert served["/v1/completions"] > served["code"], "the draft knows the first domain alone"
    for label, one in labels.items():
        assert f"  {label}: tau {one['acceptance_length']:.2f} (served {served[label]:.2f}" in said
        assert label in (output / "report.html").read_text()
    for file in output.rglob("*"):
        assert not file.is_file() or b"secret-" not in file.read_bytes()
    assert "secret-" not in said


@pytest.mark.slow
def test_it_learns_from_states_that_the_server_has_captured(
    lab, tmp_path, monkeypatch, caplog, capfd
) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, CAPTURING)
    asked = prompts("new", 240, 71)
    output = tmp_path / "run"
    words = ["--draft-model", lab.draft("old"), "follow.capture=serving", "follow.requests=240"]
    with live_server.serving(lab.target, lab.draft("old")) as url:
        answers = live_server.ask(url, asked)["answers"]
        assert cli.run(lab.follow_anew(url, output, *words)) == 0
    assert run_directory.versions(output)[-1]["version"] is not None
    assert not is_said(asked[0] + answers[0], output, caplog, capfd)
    before = lab.acceptance_length(lab.draft("old"), "new")
    assert lab.acceptance_length(output / "draft", "new") > before + 0.1


def test_a_server_that_captures_other_states_or_none_is_refused(
    lab, tmp_path, monkeypatch, command_line
) -> None:
    words = ["--draft-model", lab.draft("old"), "follow.capture=serving"]
    with live_server.serving(lab.target, lab.draft("old")) as url:
        error = command_line(*lab.follow_anew(url, tmp_path / "run", *words)).error
    assert "has no states of requests: this server captures no states" in error
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, CAPTURING)
    monkeypatch.setattr(live_server, "LAYERS", (1, 2))
    with live_server.serving(lab.target, lab.draft("old")) as url:
        error = command_line(*lab.follow_anew(url, tmp_path / "other", *words)).error
    assert "captures states of layers 1,2," in error
    assert "the draft needs states of layers 1,2,3," in error


@pytest.mark.slow
def test_random_tokens_and_one_users_flood_get_no_worse_draft_served(lab, url, tmp_path) -> None:
    output = tmp_path / "run"
    live_server.ask(url, prompts("old", 60, 40))
    draw = random.Random(41)
    poison = [[draw.randrange(97) for _ in range(draw.randrange(2, 12))] for _ in range(60)]
    live_server.ask(url, poison)
    for _ in range(3):
        live_server.ask(url, [CANARY] * 40)  # of all these one is trained on
    words = ["follow.requests=240", "train.lr=0.3"]  # what comes of it is no draft any more
    assert cli.run(lab.follow(url, output, *words)) == 0
    (row,) = run_directory.versions(output)
    assert row["acceptance_length"] < row["acceptance_length_served"]
    assert (row["served"], row["version"]) == (0, None)
    summary = run_directory.summary(output)
    assert summary["left_out"]["same_prompt"] >= 119 - 1
    assert live_server.ask(url, prompts("old", 2, 42))["versions"] == [None, None]


@pytest.mark.slow
def test_random_tokens_in_most_requests_cost_the_others_nothing(lab, url, tmp_path) -> None:
    before, output, draw = (
        lab.acceptance_length(lab.draft("old"), "old"),
        tmp_path / "run",
        random.Random(43),
    )
    poison = [[draw.randrange(3, 97) for _ in range(draw.randrange(2, 12))] for _ in range(150)]
    live_server.ask(url, poison + prompts("old", 100, 47))
    assert cli.run(lab.follow(url, output, "follow.requests=250")) == 0
    (row,) = run_directory.versions(output)
    assert row["served"] in (0, row["step"])
    assert lab.acceptance_length(output / "draft", "old") >= 0.95 * before


def test_requests_whose_features_are_nan_are_left_out_and_the_rest_is_learnt(lab, url_here, tmp_path) -> None:
    output = tmp_path / "run"
    poison = [[TOO_LARGE, *prompt] for prompt in prompts("new", 30, 45)]
    live_server.ask(url_here, poison[:15] + prompts("new", 130, 46) + poison[15:])
    assert cli.run(lab.follow(url_here, output, "follow.requests=160", "engine.dtype=float16")) == 0
    (row,) = run_directory.versions(output)
    assert row["served"] == row["step"] > 0
    assert row["acceptance_length"] > row["acceptance_length_start"]
    assert run_directory.summary(output)["left_out"]["not_finite"] == len(poison)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_with_worker_processes_the_draft_is_the_same_and_no_request_is_on_disk(
    lab, url, tmp_path, caplog, capfd, launcher
) -> None:
    caplog.set_level(0)
    poison = [[TOO_LARGE, *prompt] for prompt in prompts("new", 9, 48)]
    asked = [*poison[:5], CANARY, *prompts("new", 109, 49), *poison[5:]]
    inline, workers = tmp_path / "inline", tmp_path / "workers"
    keys = ["follow.requests=119", "follow.held_out=0.25", "engine.dtype=float16"]
    live_server.ask(url, asked)
    assert cli.run(lab.follow(url, inline, *keys)) == 0
    with draft_server.serving(lab.target, lab.draft("old"), live_server.__file__, 0) as other:
        live_server.ask(other, asked)
        by = ["placement.kind=disaggregated", f"launcher.name={launcher}"]
        words = lab.follow(other, workers, *keys, *by, "--verbose")
        assert cli.run(words) == 0
        assert set(live_server.ask(other, prompts("new", 3, 20))["versions"]) == {1}
    (one,), (same,) = run_directory.versions(inline), run_directory.versions(workers)
    assert {**one, "time": 0} == {**same, "time": 0}
    assert same["served"] == same["step"] > 0
    for name in ("model.safetensors", "config.json"):
        assert (workers / "draft" / name).read_bytes() == (inline / "draft" / name).read_bytes()
    summaries = [run_directory.summary(output) for output in (inline, workers)]
    assert summaries[0]["left_out"] == summaries[1]["left_out"]
    assert summaries[1]["left_out"]["not_finite"] == len(poison)
    assert {"engine-0.log", "trainer-0.log"} <= {file.name for file in files(workers)}
    assert not is_said(CANARY, workers, caplog, capfd)
