"""Pages for users are written in short, plain sentences."""

import re

import pytest

from .sources import ROOT

FOLDERS = (
    "*.md",
    "docs/**/*.md",
    "packages/*/README.md",
    "apps/*/README.md",
    "examples/**/*.md",
    "benchmarks/*.md",
)
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
MOST_WORDS = 20
"""Largest mean number of words of a page's sentences; a name or a command in backticks counts as one word."""

BANNED = re.compile(r"\bthat of\b|\bone that\b|\bthose that\b", re.IGNORECASE)
"""Constructions whose noun a reader has to search for: write the noun."""
OPENING = re.compile(r"Of\b")
"""A sentence that opens so names its subject last."""


def prose(text: str) -> list[str]:
    """Return the paragraphs and list items of a page in Markdown, without code, tables, headings and pictures."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( {4}\S.*|\|.*|#+ .*|<.*)$", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)
    return [part for part in (" ".join(plain(part).split()) for part in parts) if part]


def plain(text: str) -> str:
    """Return the text with each name in backticks as one word, links as their text, and no emphasis."""
    text = re.sub(r"`[^`]+`", "Name", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<!\w)[_*]|[_*](?!\w)", "", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page."""
    return [sentence for part in prose(text) for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\d\"'(])", part)]


def mean_words(found: list[str]) -> float:
    """Return the mean number of words of these sentences."""
    words = [len(re.findall(r"\S*\w\S*", sentence)) for sentence in found]
    return sum(words) / max(1, len(words))


def banned(text: str) -> list[str]:
    """Return the constructions of a page that hide a noun, those in tables too."""
    flat = " ".join(plain(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)).split())
    return [*BANNED.findall(flat), *(sentence for sentence in sentences(text) if OPENING.match(sentence))]


def test_sentences_are_short():
    found = {str(page.relative_to(ROOT)): sentences(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {
        page: max(texts, key=len) for page, texts in found.items() if mean_words(texts) > MOST_WORDS
    } == {}


def test_nouns_are_named():
    found = {str(page.relative_to(ROOT)): banned(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: constructions for page, constructions in found.items() if constructions} == {}


@pytest.mark.parametrize(
    "text",
    [
        "Its size is that\nof the target.",
        "Take the one that fits.",
        "| those that fit | 1 |",
        "- Of an engine, the first sends.",
        "It is so. Of several the first sends.",
    ],
)
def test_planted_construction_is_found(text):
    assert len(banned(text)) == 1


@pytest.mark.parametrize(
    "text", ["It is `that of`.", "```sh\necho that of\n```", "Most of it.", "He said that often."]
)
def test_other_text_passes(text):
    assert banned(text) == []


def test_sentences_are_counted_as_read():
    text = "# A title\n\nOne two `three four`. Five\nsix 0.98!\n\n- Seven [eight](nine.md)\n\n| a | b |\n\n    code\n"
    assert sentences(text) == ["One two Name.", "Five six 0.98!", "Seven eight"]
    assert mean_words(sentences(text)) == pytest.approx(8 / 3)
