"""report.html: one file with everything in it, made of whatever there is."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from spec_trainer.report.page import write_report
from spec_trainer.run.directory import RunDirectory

from .full_run import full_summary, records, write_rows


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    (tmp_path / "config.yaml").write_text("target: <b>bold & co</b>\n")
    return RunDirectory(tmp_path)


def report(directory: RunDirectory, **summary: object) -> str:
    """Write the report of a run and return the page."""
    write_report(directory, "Training", summary)
    return directory.report.read_text()


class Words(HTMLParser):
    """The text that a person reads, and every tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags = "", []
        self.feed(page)

    def handle_data(self, data):
        self.text += data + " "

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_full_report(directory):
    records(directory)
    summary = full_summary()
    entry = {"time": 0.0, "step": 7, "worker": "engine-1", "cause": "engine-1 was <killed>"}
    write_rows(directory.replacements, entry)
    page = Words(report(directory, **summary))
    assert "engine-1 7 1970-01-01" in " ".join(page.text.split())
    assert "engine-1 was <killed>" in page.text
    for part in ("2.35", "1,234", "untrained draft", "1.30", "tokens/s with the draft", "75 %", "yes"):
        assert part in page.text
    for row in (("engine takes", "300", "200", "1.50 ×"), ("8", "1,111", "99", "11.22 ×")):
        assert " ".join(row) in " ".join(page.text.split())
    assert [tag for tag, _ in page.tags].count("svg") == 5
    assert "<p> <del> <em>" in page.text
    assert not [attrs for tag, attrs in page.tags if tag in ("script", "img", "link") or "src" in attrs]


def test_speed_up_and_serving_command_come_first_and_the_configuration_is_folded(directory):
    records(directory)
    summary = {"speedup": 1.6789, "acceptance_length": 2.5, "serve": {"vllm": "vllm serve <target>"}}
    page = Words(report(directory, **summary))
    words = " ".join(page.text.split())
    order = (
        "1.68 times as fast",
        "2.50 acceptance length",
        "vllm serve <target>",
        "All keys of the configuration",
    )
    places = [words.rindex(part) for part in order]
    assert places == sorted(places)
    assert [tag for tag, _ in page.tags if tag in ("details", "summary")] == ["details", "summary"]


def test_keys_that_differ_from_defaults_are_shown_and_the_others_folded(directory):
    page = report(directory, seed=7, changed={"train": {"lr": 0.004}, "track": {}})
    shown, folded = page.split("<details>")
    assert "; seed 7</p>" in shown
    assert "Plugins, and what differs from the defaults:</p><pre>train:\n  lr: 0.004\n</pre>" in shown
    assert "target: &lt;b&gt;" in folded


def test_the_pace_of_the_steps_is_drawn_where_they_were_timed(directory):
    steps = [
        {"step": n, "loss": 1.0, "tokens_per_s": 900.0, "time_data_s": 1.0, "time_step_s": 3.0}
        for n in (1, 2)
    ]
    write_rows(directory.metrics, *steps)
    words = Words(report(directory)).text
    assert "tokens/s" in words
    assert "waits for features, % of a step" in words
    records(directory)
    assert "Pace" not in Words(report(directory)).text


def test_the_memory_of_host_and_device_is_drawn_where_it_is_known(directory):
    steps = [{"step": n, "loss": 1.0, "memory_host_bytes": n << 30} for n in (1, 2)]
    write_rows(directory.metrics, *steps)
    words = Words(report(directory)).text
    assert "host memory, GiB" in words
    assert "device memory" not in words
    steps = [step | {"memory_device_bytes": 5 << 30} for step in steps]
    write_rows(directory.metrics, *steps)
    assert "device memory, peak so far, GiB" in Words(report(directory)).text


def test_the_warnings_of_an_evaluation_are_shown(directory):
    page = report(directory, warnings=["12 generated <tokens> are few"])
    assert "Warnings 12 generated <tokens> are few" in " ".join(Words(page).text.split())
    assert "12 generated &lt;tokens&gt;" in page


def test_a_reader_with_a_dark_screen_gets_a_dark_page(directory):
    style = report(directory).split("<style>")[1].split("</style>")[0]
    light, dark = style.split("prefers-color-scheme: dark")
    named = set(re.findall(r"var\((--\w+)\)", style))
    assert named
    assert all(f"{name}: #" in light and f"{name}: #" in dark for name in named)


def test_what_was_not_measured_is_left_out(directory):
    records(directory)
    text = Words(report(directory, steps=5)).text
    assert "Speculative decoding" not in text
    assert "Where the time went" not in text
    assert "Training" in text


def test_report_without_a_single_step(directory):
    assert "<svg" not in report(directory)


def test_the_fate_of_every_push_is_a_row(directory):
    records(directory)
    committed = {"push_version": 2, "push_committed": True, "push_s": 0.5}
    rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    rows[1] |= {"push_wait_s": 0.125}
    rows[2] |= committed
    rows[3] |= {"push_version": 4, "push_committed": False, "push_s": 60.0}
    write_rows(directory.metrics, *rows)
    verdict = {"push_version": 2, "push_committed": False, "push_reverted": True}
    verdict |= {"push_acceptance_before": 2.0, "push_acceptance_after": 1.25}
    text = " ".join(Words(report(directory, last_pushes=[verdict])).text.split())
    assert "2 reverted 0.50 s 2.00 1.25 4 not committed 60.00 s" in text
    assert "Training waited 0.125 s for a push at most." in text


def test_no_value_of_a_run_directory_is_markup(directory):
    records(directory)
    clean = {"cycles": [{"cycle": 0, "draft_version": 1}], "time_s": {"data": 1.0}, "last_pushes": []}
    entry = {"time": 0.0, "step": 7, "worker": "engine-1", "cause": "killed"}
    write_rows(directory.replacements, entry)
    expected = {tag for tag, _ in Words(report(directory, description="a draft", **clean)).tags}
    markup = "<img src=x onerror=alert(1)>"
    forged = {"cycles": [{"cycle": 0, "draft_version": markup}], "time_s": {markup: 1.0}}
    forged["last_pushes"] = [{"push_version": markup, "push_committed": markup}]
    directory.config.write_text(markup)
    write_rows(directory.replacements, {**entry, "worker": markup, "cause": markup})
    write_report(directory, markup, {"description": markup, **forged})
    page = Words(directory.report.read_text())
    assert {tag for tag, _ in page.tags} == expected
    assert page.text.count(markup) >= 6


def test_without_matplotlib_a_report_says_how_to_get_plots(directory, monkeypatch):
    records(directory)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Words(report(directory))
    assert "svg" not in {tag for tag, _ in page.tags}
    assert "pip install 'spec-trainer[plots]'" in page.text
