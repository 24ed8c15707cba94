"""Choose the token that fills the slots to be guessed, if the configuration names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import TargetError
from spec_core.foreign import read_json_object

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.target import TargetSpec

_MASKS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")
_SPARE = ("reserved", "unused")


def choose_mask_token(target: TargetSpec) -> int:
    """Return the id of the token that fills the slots to be guessed; it is below the vocabulary's size.

    It is the first of these that exists: the tokenizer's mask token; the first id after the tokenizer's last
    token (a padded vocabulary has such ids); the tokenizer's first token that is named as reserved or unused; the
    last id of the vocabulary that is no end token. ``<|MASK|>`` comes first because SGLang refuses any other id
    if the tokenizer has that token.
    """
    ids = _token_ids(target.folder / "tokenizer.json")
    candidates = [ids[name] for name in _MASKS if name in ids]
    candidates += [max(ids.values()) + 1] if ids else []
    candidates += sorted(number for name, number in ids.items() if _is_spare(name))
    candidates += reversed(range(target.vocab_size))
    fitting = (token for token in candidates if token < target.vocab_size)
    return next((token for token in fitting if token not in target.eos_token_ids), 0)


def _is_spare(name: str) -> bool:
    return name.startswith(("<", "[")) and any(word in name.lower() for word in _SPARE)


def _token_ids(file: Path) -> dict[str, int]:
    """Return token -> id of a Hugging Face tokenizer.json; empty if the file does not exist."""
    if not file.exists():
        return {}
    try:
        fields = read_json_object(file, TargetError)
        vocabulary = fields["model"].get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: [token, score], the id is the index
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        return vocabulary | {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
    except TargetError as error:
        raise TargetError(f"{error}; set draft.mask_token_id") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TargetError(
            f"{file} cannot be read as a tokenizer: {error!r}; set draft.mask_token_id"
        ) from None
