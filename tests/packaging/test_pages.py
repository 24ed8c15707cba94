"""The pages on writing a plugin: their code is a third party's code, all of it, and their commands work."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/write-a*.md")}
TARGETS = (ROOT / "docs/targets.md").read_text(encoding="utf-8")
LING = ROOT / "tests/plugins/spec-target-type-ling"


def plugin_of(page: str) -> Path:
    """Return the folder of the plugin that a page builds: the first that it links to."""
    return ROOT / re.search(r"\(\.\./(tests/plugins/[\w-]+)\)", PAGES[page])[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def test_the_pages_are_found():
    kinds = {
        "a-backend", "a-draft", "an-engine", "an-engine-that-speculates", "a-launcher", "an-optimizer",
        "a-strategy", "a-tracker", "a-weight-transport",
    }  # fmt: skip
    assert PAGES.keys() == {f"write-{kind}" for kind in kinds}


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_are_taken_from_the_plugin(page):
    sources = [file.read_text(encoding="utf-8") for file in plugin_of(page).rglob("*.py")]
    shown = blocks(page, "python")
    assert len(shown) > 3
    assert [block for block in shown if not any(block.strip("\n") in text for text in sources)] == []


@pytest.mark.parametrize("page", PAGES)
def test_metadata_is_taken_from_the_plugin(page):
    text = (plugin_of(page) / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = blocks(page, "toml")
    assert [table for table in block.split("\n\n") if table.strip() not in text] == []


def test_the_type_of_target_that_a_page_adds_is_the_plugins():
    (code,) = re.findall(r"^```python\n(.*?)^```$", TARGETS, re.MULTILINE | re.DOTALL)
    (metadata,) = re.findall(r"^```toml\n(.*?)^```$", TARGETS, re.MULTILINE | re.DOTALL)
    assert code in (LING / "src/spec_target_type_ling/types.py").read_text(encoding="utf-8")
    assert metadata in (LING / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_public_method_is_shown(page):
    shown = "".join(blocks(page, "python"))
    sources = "".join(file.read_text(encoding="utf-8") for file in plugin_of(page).glob("src/**/*.py"))
    methods = re.findall(r"^    def ([a-z]\w*)\(", sources, re.MULTILINE)
    assert len(methods) >= 3
    assert [name for name in methods if f"def {name}(" not in shown] == []


@pytest.fixture(scope="module")
def output_of(run, clean_python, tmp_path_factory):
    """``output_of(command)``: what it prints in the clean environment; one that several pages show runs once."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def output_of(command: str) -> str:
        program, *arguments = command.split()
        return run(clean_python.with_name(program), *arguments, cwd=folder)

    return output_of


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("pages of plugins")
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_work(output_of, page):
    name = plugin_of(page).name
    commands = [line.removeprefix("$ ") for line in "".join(blocks(page, "console")).splitlines()]
    assert commands[0] == f"pip install ./{name}"
    assert len(commands) > 1
    for command in commands[1:]:
        assert name.rpartition("-")[2] in output_of(command)
