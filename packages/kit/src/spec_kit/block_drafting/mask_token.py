"""Choose the token that fills the slots to be guessed, if the configuration names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import TargetError
from spec_kit.targets import tokenizer_tokens

if TYPE_CHECKING:
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
    ids = _tokens(target)
    candidates = [ids[name] for name in _MASKS if name in ids]
    candidates += [max(ids.values()) + 1] if ids else []
    candidates += sorted(number for name, number in ids.items() if _is_spare(name))
    candidates += reversed(range(target.vocab_size))
    fitting = (token for token in candidates if token < target.vocab_size)
    return next((token for token in fitting if token not in target.eos_token_ids), 0)


def _is_spare(name: str) -> bool:
    return name.startswith(("<", "[")) and any(word in name.lower() for word in _SPARE)


def _tokens(target: TargetSpec) -> dict[str, int]:
    try:
        return tokenizer_tokens(target.folder)
    except TargetError as error:
        raise TargetError(f"{error}; set draft.mask_token_id") from None
