import textwrap
from pathlib import Path

import pytest

from spec_trainer.cli.quickstart.corpus import Document, python_documents, split_by_file

MODULE = '''
"""A module whose docstring is certainly long enough to be taken for a document of its own, not for a stub."""

@final
class Shelf:
    """Holds books in the order in which they came."""

    def size(self):
        return len(self.books)

def documented_inside(book):
    def inner(page):
        """What stands on the page."""
    return inner

def undocumented(book):
    return "no docstring: not a document, however long this text may be made by one who writes a test"
'''
TOPICS = """
# -*- coding: utf-8 -*-
topics = {'assert': 'The "assert" statement\\n'
          '**********************\\n'
          '\\n'
          'Assert statements are a convenient way to insert debugging assertions.\\n'}
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    def write(name: str, text: str, encoding: str = "utf-8") -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip(), encoding=encoding)

    write("shelf.py", MODULE)
    write("copy_of_shelf.py", MODULE)
    write("pydoc_data/topics.py", TOPICS)
    write("test/test_shelf.py", MODULE.replace("Shelf", "TestShelf"))
    write("site-packages/foreign.py", MODULE.replace("Shelf", "Foreign"))
    write("template.py", "{{ not python }}")
    write("undecodable.py", '"""' + "é" * 100 + '"""', encoding="latin-1")
    (tmp_path / "null.py").write_bytes(b"x = 1\0")
    return tmp_path


def test_documents_are_docstrings_whole_documented_definitions_and_topics(library) -> None:
    module, definition, function, topic = (document.text for document in python_documents(library))

    assert module.startswith("A module whose docstring")
    assert definition.startswith("@final\nclass Shelf:\n    ")
    assert definition.endswith("return len(self.books)")
    assert function.startswith("def documented_inside(book):")
    assert topic.startswith('The "assert" statement\n****')


def test_repeats_and_unreadable_or_skipped_files_give_no_documents(library) -> None:
    sources = [document.source for document in python_documents(library)]

    assert sources == ["copy_of_shelf.py"] * 3 + ["pydoc_data/topics.py"]


@pytest.mark.slow
def test_this_pythons_library_is_enough_to_train_on() -> None:
    documents = python_documents()

    assert documents == sorted(documents, key=lambda document: Path(document.source))
    assert len({document.text for document in documents}) == len(documents)
    assert sum(len(document.text) for document in documents) > 2_000_000
    assert not [document for document in documents if document.source.startswith(("test/", "site-packages/"))]


def test_no_file_is_on_both_sides_of_the_split() -> None:
    documents = [Document(f"file{i % 50}.py", f"text {i}") for i in range(500)]

    train, held_out = split_by_file(documents, held_out_share=0.2, seed=0)

    assert not {document.source for document in train} & {document.source for document in held_out}
    assert len(train) + len(held_out) == len(documents)
    assert 0.05 < len(held_out) / len(documents) < 0.4
    assert (train, held_out) == split_by_file(documents, held_out_share=0.2, seed=0)
    assert (train, held_out) != split_by_file(documents, held_out_share=0.2, seed=1)


def test_nearly_the_same_text_is_not_held_out() -> None:
    passage = "\n".join(f"    the same long line, number {i}, in more than one file" for i in range(5))
    copies = [Document(f"file{i}.py", f"def function_{i}():\n{passage}") for i in range(50)]

    train, held_out = split_by_file(copies, held_out_share=0.2, seed=0)

    assert train
    assert held_out == []
