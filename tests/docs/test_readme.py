"""Every command of the README is run as it stands, and what its pages say of files and packages is true."""

import re
import tomllib
from pathlib import Path

import pytest

from spec_trainer.cli import app as cli

from .workplace import commands

ROOT = Path(__file__).parents[2]


COMMANDS = commands(ROOT / "README.md")
PACKAGE_PAGES = sorted(ROOT.glob("packages/*/README.md"))


def test_the_readme_commands_run_in_order(here, capsys):
    ran = [words for words in COMMANDS if words[0] == "spec-trainer"]
    for words in ran:
        code = cli.run(words[1:])
        assert code == 0, (words, capsys.readouterr().err)
    assert [words[1] for words in ran] == ["plan", "train", "evaluate"]
    assert (here / "runs/mine/draft/model.safetensors").is_file()


def test_the_readme_names_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in COMMANDS if words[0] == "make"}
    assert {"quickstart", "test"} <= named <= targets


def test_the_install_page_installs_the_command_with_all_that_it_needs_from_here():
    install = next(
        words
        for words in commands(ROOT / "docs/install.md")
        if words[:2] == ["pip", "install"] and "./apps/trainer" in words
    )
    folders = [ROOT / word for word in install[2:]]
    assert all((folder / "pyproject.toml").is_file() for folder in folders)
    # tests/packaging installs them; here: none of the command's own requirements is left to an index.
    project = tomllib.loads((ROOT / "apps/trainer/pyproject.toml").read_text())["project"]
    needed = re.findall(r"(spec-[a-z0-9-]+)>=", " ".join(project["dependencies"]))
    named = {
        re.search(r'^name = "(.*)"', (folder / "pyproject.toml").read_text(), re.MULTILINE)[1]
        for folder in folders
    }
    assert set(needed) <= named


def test_uv_knows_every_member_and_the_pins():
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    members = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
    names = {tomllib.loads(member.read_text())["project"]["name"] for member in members}
    assert set(uv["sources"]) == names
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert uv["constraint-dependencies"] == pins


def test_the_workflow_and_the_hooks_run_what_is_there():
    import yaml

    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["ci"]["steps"] if "run" in step] == [".ci/run"]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert commands == {".venv/bin/ruff", ".venv/bin/lint-imports"}


ALL_PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("*/*/README.md"),
    *ROOT.glob("tests/*/*/README.md"),
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    link_to = re.compile(r"(?:\]\(|href=\"|^\[[^\]]+\]: )(?!http)([^)#\"\s]*)#?([^)\"\s]*)", re.MULTILINE)
    for page in ALL_PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link, anchor in link_to.findall(text):
            path = page.parent / link if link else page
            assert path.exists(), (page, link)
            assert not anchor or anchor in anchors(path), (page, link, anchor)


def test_files_that_a_page_names_are_there():
    named = re.compile(r"`((?:docs|examples|benchmarks|tests|packages|apps)/[\w/.*-]*[\w*/])[`\[]")
    for page in ALL_PAGES:
        paths = named.findall(page.read_text())
        assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == [], page


@pytest.mark.parametrize("page", PACKAGE_PAGES, ids=lambda page: page.parent.name)
def test_a_package_names_modules_that_exist(page):
    (package,) = (page.parent / "src").iterdir()
    rows = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `")]
    modules = [name for row in rows for name in re.findall(r"`([\w/*]+(?:\.py|/))`", row)]
    assert [name for name in modules if not list(package.glob(name))] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid_configurations(example):
    from spec_trainer.plan.resolve import resolve_config

    config, _ = resolve_config(example, {"backend.name": "cpu", "engine.name": "hf"}, [])
    assert config.train.lr > 0


@pytest.mark.parametrize("page", ["configuration", "combinations"])
def test_a_made_page_is_what_its_generator_prints(page, capsys):
    import runpy

    runpy.run_path(str(ROOT / f"docs/generate_{page}.py"), run_name="__main__")
    assert capsys.readouterr().out == (ROOT / f"docs/{page}.md").read_text()
