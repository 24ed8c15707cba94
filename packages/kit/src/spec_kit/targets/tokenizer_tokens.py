"""Read the tokens of a target's tokenizer.json without the library tokenizers."""

from __future__ import annotations

from pathlib import Path

from spec_core import foreign_errors, read_json_object
from spec_core.errors import TargetError


def tokenizer_tokens(folder: Path) -> dict[str, int]:
    """Return token -> id of the folder's tokenizer.json; empty if there is none.

    Raise TargetError if it cannot be read as a tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return {}
    with foreign_errors(TargetError, f"{file} cannot be read as a tokenizer"):
        fields = read_json_object(file, TargetError)
        vocabulary = fields["model"].get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: [token, score], the id is the index
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        return vocabulary | {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
