"""Every command on a page is run in small, or planned and its like run by another test."""

import json
import re
import shutil
from pathlib import Path

import pytest

from spec_trainer.cli import app as cli

from ..integration.foreign_layouts import as_specforge
from ..unit.trainer.measure.server.streaming_server import streaming
from .workplace import commands

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("*/*/README.md"),
    ROOT / "CONTRIBUTING.md",
]
PLACES = {"TARGET": "path/to/target", "DATA": "chats.jsonl", "DRAFT": "runs/mine/draft", "DIR": "out"}
ELSEWHERE = {
    "--launcher": "tests/integration/test_ray_runs.py",
    "--strategy": "tests/contract/test_megatron_strategy.py",
    "replicated": "tests/packaging/test_third_party_strategy.py",
    "optimizer.name=normed": "tests/packaging/test_third_party_strategy.py",
    "check": "tests/rig_ascend/test_backend.py",
    "push": "tests/integration/test_pushes.py",
    "serving": "tests/integration/test_pushes.py",
    "follow": "tests/integration/follow/test_learning.py",
    "--whole-target": "tests/integration/test_whole_target.py",
    "engine.gguf=": "tests/engines/test_llamacpp_commands.py",
    "examples/": "tests/docs/test_recipes.py",
    "Qwen/": "tests/docs/test_recipes.py",
}
"""Words of a command that needs what is not here -> the test that runs its like."""
HERE = {"--engine": "hf", "--backend": "cpu", "--max-new-tokens": "4"}
"""Options of a command -> their values here."""
SIZES = {
    "engine.name": "hf", "train.steps": "2", "train.push_every": "1", "train.serve_every": "1",
    "decode.every": "1", "decode.prompts": "2", "decode.max_new_tokens": "4",
}  # fmt: skip
"""Keys of a command -> their values here."""
ROWS = {
    "mt_bench": {"prompt": ["Who is it?", "Why?"]},
    "gsm8k": {"question": "Two and two?", "answer": "4"},
    "humaneval": {"prompt": "def f(x):"},
    "math500": {"problem": "Two and two?"},
}


ALL = [(page.relative_to(ROOT).as_posix(), words) for page in sorted(PAGES) for words in commands(page)]
OURS = [
    (page, [PLACES.get(word, word) for word in words[1:]])
    for page, words in ALL
    if "spec-trainer" in words[0]
]
OURS = [(page, words[: words.index("2>&1")] if "2>&1" in words else words) for page, words in OURS]
AWAY = [words for _, words in OURS if any(word.startswith(part) for part in ELSEWHERE for word in words)]
PLANNED = [
    words
    for words in AWAY
    if words[0].startswith("--") or words[0] in ("train", "plan")
    if not {"replicated", "optimizer.name=normed"} & set(words) and "examples/" not in " ".join(words)
]
RUN = [page for page, words in OURS if words not in AWAY]


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


@pytest.fixture(scope="module")
def servers():
    """Options that name servers -> the addresses of servers here."""
    with streaming() as (server, _), streaming(speculates=False) as (baseline, _):
        yield {"--server": server, "--baseline-server": baseline}


def as_here(words: list[str]) -> list[str]:
    """The command with the engine and the device that are here, in small."""
    kept = [word for word in words if not word.startswith("engine.args.")]
    kept = [HERE.get(before, word) for before, word in zip(["", *kept], kept, strict=False)]
    kept = [f"{key}={SIZES.get(key, value)}" if equals else key for key, equals, value in map(_parts, kept)]
    if "--bench" in kept:
        kept += ["--bench-data", "benchmarks", "--max-new-tokens", "4"]
    if kept[0].startswith("--") or kept[0] == "train":
        kept += ["draft.num_steps=2", "train.global_batch_tokens=512"]
        decoded = ["decode.prompts", "decode.max_new_tokens"] if "decode.every=1" in kept else []
        sizes = [f"{key}={SIZES[key]}" for key in ("train.steps", *decoded)]
        kept += [size for size in sizes if size not in kept]
    return kept


def _parts(word: str) -> tuple[str, str, str]:
    return word.partition("=") if re.match(r"[a-z_]+(\.[a-z_]+)+=", word) else (word, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(set(RUN)))
def test_the_commands_of_a_page_run_in_order(page, here, servers, capsys):
    (here / "benchmarks").mkdir()
    for name, row in ROWS.items():
        (here / "benchmarks" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    for words in (as_here(words) for other, words in OURS if other == page and words not in AWAY):
        words = [servers.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        if "THEIRS" in words:
            as_specforge(here / "runs/mine/draft", here / "path/to/target", here / "THEIRS")
        if words[0] == "train" or words[0].startswith("--"):
            shutil.rmtree(here / "runs", ignore_errors=True)  # a page shows several ways to train
        if "--resume-from" in words:
            words.append("train.save_every=1")
            assert cli.run([*words, "train.resume_from=latest"]) == 0, capsys.readouterr().err
        assert cli.run(words) == 0, (words, capsys.readouterr().err)


def test_runs_that_need_more_than_is_here_can_be_planned(tmp_path, monkeypatch, capsys, make_target):
    monkeypatch.chdir(tmp_path)
    Path("path/to/target").mkdir(parents=True)
    for file in make_target("llama", vocab_size=96).iterdir():
        Path("path/to/target", file.name).symlink_to(file)
    rows = [{"input_ids": [number, 2, 3, 4], "loss_mask": [0, 1, 1, 1]} for number in range(40)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(
        "target: path/to/target\ndata: {path: chats.jsonl}\nplacement: {kind: disaggregated}\n"
    )
    for words in PLANNED:
        plan = words if words[0] == "plan" else ["plan", *words[words[0] == "train" :]]
        plan = [
            word
            for word in plan
            if not word.startswith(("push.to", "train.push_every", "engine.tensor_parallel"))
        ]
        plan = [HERE.get(before, word) for before, word in zip(["", *plan], plan, strict=False)]
        assert cli.run(plan) == 0, (words, capsys.readouterr().err)
    assert len(PLANNED) >= 5


def test_what_is_not_run_here_is_run_elsewhere():
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).is_file()] == []
    others = ("--whole-target", "Qwen/", "engine.gguf=")
    without_target = [words for words in AWAY if any(other in " ".join(words) for other in others)]
    away = {words[0] for words in AWAY if words not in without_target}
    assert away & {"capture", "regenerate", "evaluate", "convert", "export"} == set()


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
