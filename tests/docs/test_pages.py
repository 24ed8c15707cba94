"""Every command on a page is one that the command line takes; runs are planned, where what they name is here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from spec_trainer import cli

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), ROOT / "CONTRIBUTING.md"]
PLACES = {"TARGET": "path/to/target", "DATA": "chats.jsonl", "DRAFT": "runs/mine/draft", "DIR": "out"}
_FIRST = re.compile(r"(?:\.venv/bin/)?(?:spec-trainer|make|python|pip|vllm)\b")
ELSEWHERE = (
    "vllm",
    "sglang",
    "ascend",
    "cuda",
    "ray",
    "replicated",
    "copies",
    "engine.args",
    "decode",
    "push",
    "features",
)
"""Words of a run that names a program, a device, a third party's plugin or a folder that is not here."""


def commands(page: Path) -> list[list[str]]:
    """Words of every command in shell blocks and indented lines."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if re.match(r"    \S", line)]
    return [shlex.split(line, comments=True) for line in lines if _FIRST.match(line)]


ALL = [(page.relative_to(ROOT).as_posix(), words) for page in sorted(PAGES) for words in commands(page)]
OURS = [
    (page, [PLACES.get(word, word) for word in words[1:]])
    for page, words in ALL
    if "spec-trainer" in words[0]
]
OURS = [(page, words[: words.index("2>&1")] if "2>&1" in words else words) for page, words in OURS]
RUNS = [
    words
    for _, words in OURS
    if words[0].startswith("--") or words[0] in ("train", "plan")
    if not any(part in word for word in words for part in ELSEWHERE) and "examples/" not in " ".join(words)
]


@pytest.mark.parametrize(
    ("page", "words"), OURS, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_the_command_line_takes_the_command(page, words):
    _, _, ignored = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert ignored is not None
    overrides = [word for word in words if re.match(r"[a-z_]+(\.[a-z_]+)*=", word)]
    sections = {
        line.split("`")[1]
        for line in (ROOT / "docs/configuration.md").read_text().splitlines()
        if "| `" in line
    }
    known = {word.partition("=")[0] for word in overrides}
    assert {
        key
        for key in known
        if key not in sections and not key.startswith(("engine.args.", "strategy.copies"))
    } == set()


def test_the_runs_can_be_planned(tmp_path, monkeypatch, capsys, make_target):
    monkeypatch.chdir(tmp_path)
    Path("path/to/target").mkdir(parents=True)
    for file in make_target("llama", vocab_size=96).iterdir():
        Path("path/to/target", file.name).symlink_to(file)
    rows = [{"input_ids": [number, 2, 3, 4], "loss_mask": [0, 1, 1, 1]} for number in range(40)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(
        "target: path/to/target\ndata: {path: chats.jsonl}\nplacement: {kind: disaggregated}\n"
    )
    for words in RUNS:
        plan = words if words[0] == "plan" else ["plan", *words[words[0] == "train" :]]
        assert cli.run(plan) == 0, (words, capsys.readouterr().err)
    assert len(RUNS) >= 3


@pytest.mark.parametrize("page", sorted({page for page, _ in ALL}))
def test_files_and_targets_of_make_that_a_command_names_are_there(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in (words for other, words in ALL if other == page):
        if words[0] == "make":
            assert words[1] in targets
        named = [
            word.partition("[")[0]
            for word in words
            if word.startswith(("./", "benchmarks/", "examples/", "docs/"))
        ]
        assert [name for name in named if not (ROOT / name).exists()] == [], words
