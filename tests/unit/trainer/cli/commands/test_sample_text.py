"""Samples as text: nothing is lost or added, and what is marked is what the loss mask says."""

import numpy as np
import pytest

from spec_trainer.cli.commands.sample_text import sample_lines, sample_texts
from spec_trainer.data.dataset import Sample
from spec_trainer.data.tokens import Encoder

from .....chat_templates import thinking_tokenizer

TEXT = "Wie heißt Köln? — 北京 ok"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    """Each byte has a token: masks can begin inside of a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    thinking_tokenizer().save_pretrained(folder)
    return Encoder(folder, 300)


def sample(text: str, supervised: range) -> Sample:
    ids = np.array(thinking_tokenizer()(text)["input_ids"], dtype=np.int32)
    return Sample(0, ids, np.isin(np.arange(len(ids)), supervised), "rows.jsonl:1")


@pytest.mark.parametrize("start", range(len(TEXT.encode())))
def test_the_parts_are_the_whole_text_wherever_the_mask_begins(encoder, start):
    (shown,) = sample_texts([sample(TEXT, range(start, start + 5))], encoder)
    assert "".join(part["text"] for part in shown["parts"]) == TEXT
    # A character of which only the last bytes are supervised is shown as supervised.
    before = TEXT.encode()[:start].decode(errors="ignore")
    marked = [part["text"] for part in shown["parts"] if part["supervised"]]
    assert TEXT.startswith(before + marked[0])


def test_marks_stand_around_what_is_supervised_and_colours_in_their_place(encoder):
    texts = sample_texts([sample("a bc\nd e", range(2, 6))], encoder)
    assert list(sample_lines(texts, coloured=False)) == [
        "",
        "--- rows.jsonl:1: 4 of 8 tokens supervised",
        "a [[bc\nd]] e",
    ]
    assert list(sample_lines(texts, coloured=True))[-1] == "a \x1b[1;32mbc\x1b[0m\n\x1b[1;32md\x1b[0m e"


@pytest.mark.parametrize("coloured", [True, False])
def test_a_text_cannot_give_orders_to_the_terminal(encoder, coloured):
    texts = sample_texts([sample("\x1b[2Jgone", range(4))], encoder)
    assert "\x1b[2J" not in "\n".join(sample_lines(texts, coloured))
