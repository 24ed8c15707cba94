"""Check that the tokens of an answer spell its text."""

from __future__ import annotations

import unicodedata
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


def spelling_problem(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> str:
    """Return why tokens do not decode to a text, up to white space and Unicode normalisation; "" if they do.

    An unknown token among them decodes to nothing, and is no problem.
    """
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return ""
    decoded = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    spelt, expected = _squeezed(decoded), _squeezed(text)
    if decoded == text or spelt == expected:
        return ""
    if expected in spelt:  # a token at its border also holds text of its neighbour
        return "an assistant turn is not made of whole tokens"
    lost = next(one for one, other in zip_longest(expected, spelt, fillvalue="") if one != other)
    name = f"{lost!r} (U+{ord(lost):04X})" if lost else "the end"
    return f"the tokenizer does not keep the text of an assistant turn, from {name} on"


def _squeezed(text: str) -> str:
    # SentencePiece writes spaces as U+2581; NFKC and case folding cover the usual normalisers.
    return "".join(unicodedata.normalize("NFKC", text).replace("\u2581", " ").casefold().split())
