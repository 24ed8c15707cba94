"""Pages name the results of benchmarks, and every result that is kept is on a page."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted(file.name for file in ROOT.glob("benchmarks/results/*.json"))
PAGES = [
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("*.md"),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("*/*/README.md"),
]
NAMED = {name for page in PAGES for name in re.findall(r"[\w*-]+\.json", page.read_text(encoding="utf-8"))}
"""Whole names, patterns such as ``h200-transport-*.json``, and ends such as ``-6.json`` behind a first name."""


@pytest.mark.parametrize("result", RESULTS)
def test_each_result_is_named_by_a_page(result):
    names = [name.replace("-", "*-", 1) if name.startswith("-") else name for name in NAMED]
    assert any(fnmatch(result, name) for name in names)
