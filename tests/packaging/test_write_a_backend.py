"""The tutorial's code is the stranger's code, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")  # one worker: the environment is made once

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
ECHO = ROOT / "tests" / "plugins" / "spec-backend-echo"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_code_blocks_are_taken_from_the_plugin():
    sources = [file.read_text(encoding="utf-8") for file in ECHO.rglob("*.py")]
    assert len(blocks("python")) == 6
    missing = [block for block in blocks("python") if not any(block.strip("\n") in text for text in sources)]
    assert missing == []


def test_metadata_is_taken_from_the_plugin():
    text = (ECHO / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = blocks("toml")
    assert [table for table in block.split("\n\n") if table.strip() not in text] == []


def test_every_method_of_the_backend_is_shown():
    shown = "".join(blocks("python"))
    methods = re.findall(
        r"^    def ([a-z]\w*)\(", (ECHO / "src/spec_backend_echo/backend.py").read_text(), re.MULTILINE
    )
    assert len(methods) >= 7
    assert [name for name in methods if f"def {name}(" not in shown] == []


def test_commands_of_the_page_work(run, clean_python):
    commands = [line.removeprefix("$ ") for line in "".join(blocks("console")).splitlines()]
    assert [words.split()[0] for words in commands] == ["pip", "spec-trainer", "spec-trainer"]
    for words in commands[1:]:
        program, *arguments = words.split()
        assert "echo" in run(clean_python.with_name(program), *arguments)
