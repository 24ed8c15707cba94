"""Docstrings open with a sentence or a noun, words have one meaning, and no public name stands twice."""

import ast
import re
from collections import defaultdict

import pytest

from .sources import ROOT, SOURCES, text, tree, walked

PROGRAMS = [
    file for folder in ("tests", "benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *ROOT.glob("*/*/README.md"),
    *ROOT.glob("docs/**/*.md"),
]

OPENING = re.compile(r"(Of|For|By|That|What|Where|Until|With|While)\b")
"""A beginning that needs the name above it to be understood."""
FRAGMENT = re.compile(rf"{OPENING.pattern}|[A-Z]{{1,2}}\d+([,–-]\s*[A-Z]{{0,2}}\d+)*\.?$", re.MULTILINE)
"""Such a beginning, or a line of nothing but clause numbers, which only a test may have: its name is a sentence."""

DROPPED = {
    "baton": "block event",
    "buried": "reaped",
    "bury": "reap",
    "crowd": "processes per device",
    "desk": "capture controller",
    "farewell": "a clean close",
    "guardian": "reaper",
    "hear": "receive",
    "heard": "received",
    "hello": "handshake request",
    "incarnation": "previous run",
    "law": "distribution",
    "lobby": "what it does: accept members",
    "of ours": "this project's",
    "outlet": "feature exporter",
    "person": "user",
    "processor": "CPU",
    "remoteness": "whether an error is secondary",
    "see off": "send",
    "soundness": "what is checked",
    "stranger": "third party",
    "taker": "consumer",
    "tally": "counters",
    "tell": "send, or show",
    "told": "sent, or shown",
    "welcome": "handshake response",
}
"""Words that readers of the field had to guess, and what to write instead."""
WORD = re.compile(rf"(?<![a-z-])({'|'.join(DROPPED)})s?(?![a-z])", re.IGNORECASE)

MAY_REPEAT = {"main"}
"""The entry of a program has the same name in each."""


def docstrings(module: ast.Module) -> list[tuple[int, str]]:
    """Return line and text of every docstring, those of attributes too."""
    return [
        (statement.lineno, statement.value.value.strip())
        for node in walked(module)
        for statement in (
            getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ()
        )
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


def fragments(module: ast.Module, pattern: re.Pattern[str] = FRAGMENT) -> list[int]:
    """Return the lines of docstrings whose first line cannot be read alone."""
    return [line for line, found in docstrings(module) if pattern.match(found)]


FOREIGN = re.compile(
    r"\bllm\.output_processor\b|(?:image|video)[ _]?processor\w*|\w+VLProcessor|ProcessorMixin|\bprocessor_config\b"
    r"|mm_processor_(?:cache_gb|kwargs)|\bprocessor_output\b|\bcustom_logit_processor\b|\blogits_processor\b",
    re.IGNORECASE,
)
"""Names that are vLLM's, SGLang's and transformers'."""


def dropped_words(written: str) -> list[tuple[int, str]]:
    """Return line and word of each dropped word, also within names."""
    return [
        (number, found[0].lower())
        for number, line in enumerate(written.splitlines(), start=1)
        for found in WORD.finditer(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", FOREIGN.sub("", line)))
    ]


def top_level_names(module: ast.Module) -> list[str]:
    """Return the public classes and functions that a module defines."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [node.name for node in module.body if isinstance(node, kinds) and not node.name.startswith("_")]


def bare_methods(modules: list[ast.Module]) -> list[str]:
    """Return the public methods without a docstring of their own or of a method that they override."""
    classes = {
        node.name: node for module in modules for node in walked(module) if isinstance(node, ast.ClassDef)
    }

    def is_documented(owner: str, method: str) -> bool:
        if owner not in classes:
            return False
        own = [node for node in classes[owner].body if getattr(node, "name", None) == method]
        bases = [re.split(r"[\[.]", ast.unparse(base).partition("[")[0])[-1] for base in classes[owner].bases]
        return any(map(ast.get_docstring, own)) or any(is_documented(base, method) for base in bases)

    return [
        f"{name}.{node.name}"
        for name, owner in classes.items()
        if not name.startswith("_")
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith(("_", "test_"))
        and not is_documented(name, node.name)
    ]


def test_public_methods_are_documented():
    assert bare_methods(list(map(tree, SOURCES))) == []


def test_a_bare_method_is_found_and_an_overriding_one_is_not():
    code = (
        "class A:\n def f(self):\n  'Return 1.'\n def g(self): pass\nclass B(lib.A[int]):\n def f(self): pass"
    )
    assert bare_methods([ast.parse(code)]) == ["A.g"]


def test_docstrings_can_be_read_alone():
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for files, pattern in ((SOURCES, FRAGMENT), (PROGRAMS, OPENING))
        for file in files
        for line in fragments(tree(file), pattern)
    ]
    assert found == []


def test_dropped_words_stay_away():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word!r}"
        for file in [*SOURCES, *PAGES]
        for line, word in dropped_words(text(file))
    ]
    assert found == []


def test_no_public_name_stands_twice():
    files_of = defaultdict(list)
    for file in SOURCES:
        for name in top_level_names(tree(file)):
            files_of[name].append(str(file.relative_to(ROOT)))
    repeated = {name: files for name, files in files_of.items() if len(files) > 1}
    assert {name: files for name, files in repeated.items() if name not in MAY_REPEAT} == {}


@pytest.mark.parametrize(
    "docstring",
    [
        "Of AdamW.",
        "By any thread: the connection is over.",
        "E5.",
        "T2, T5, T6.",
        "What has died.",
        "That of a rank.",
        "W1–W3.",
        "While both are so.",
    ],
)
def test_planted_fragment_is_found(docstring):
    assert fragments(ast.parse(f"def f():\n    '''{docstring}'''")) == [2]
    assert fragments(ast.parse(f"x = 1\n'''{docstring}'''")) == [2]


@pytest.mark.parametrize(
    "docstring", ["Return the weights (E5).", "Bytes of a token.", "Offsets of tokens.", "E5 holds here."]
)
def test_whole_first_lines_pass(docstring):
    assert fragments(ast.parse(f"def f():\n    '''{docstring}'''")) == []


@pytest.mark.parametrize(
    "text",
    [
        "class CaptureDesk:",
        "capture_desk = 1",
        "# a stranger's plugin",
        "vLLM for processors",
        "Errors of ours pass.",
        "Laws",
    ],
)
def test_planted_word_is_found(text):
    assert dropped_words(text)


@pytest.mark.parametrize("text", ["personal", "lawful", "intelligible", "a tall order", "hearth"])
def test_other_words_pass(text):
    assert dropped_words(text) == []
