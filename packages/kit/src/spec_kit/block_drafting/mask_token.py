"""Choose the token that fills the slots to be guessed, if the configuration names none."""

from __future__ import annotations

import logging
from functools import cache

from spec_core import TargetSpec
from spec_core.errors import TargetError
from spec_kit.targets.tokenizer_tokens import tokenizer_tokens

log = logging.getLogger(__name__)

_MASKS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")
_SPARE = ("reserved", "unused")


def choose_mask_token(target: TargetSpec) -> int:
    """Return the id of the token that fills the slots to be guessed; it is below the vocabulary's size.

    It is the first of these that exists: the tokenizer's mask token; the first id after the tokenizer's last
    token (a padded vocabulary has such ids); the tokenizer's first token that is named as reserved or unused; the
    last id of the vocabulary that is no end token. ``<|MASK|>`` comes first because SGLang refuses any other id
    if the tokenizer has that token. Log a warning if the token is an ordinary one, which texts may have.
    """
    ids = _tokens(target)
    candidates = [ids[name] for name in _MASKS if name in ids]
    candidates += [max(ids.values()) + 1] if ids else []
    candidates += sorted(number for name, number in ids.items() if _is_spare(name))
    candidates += reversed(range(target.vocab_size))
    fitting = (token for token in candidates if token < target.vocab_size)
    chosen = next((token for token in fitting if token not in target.eos_token_ids), 0)
    name = next((name for name, number in ids.items() if number == chosen), None)
    if name is not None and name not in _MASKS and not _is_spare(name):
        _warn(chosen, name)
    return chosen


@cache  # a draft asks more than once
def _warn(token: int, name: str) -> None:
    log.warning(
        "the target's tokenizer has no mask token and no spare one: the slots to be guessed have the token %d, %r, "
        "which texts may have, too; draft.mask_token_id sets another",
        token,
        name,
    )


def _is_spare(name: str) -> bool:
    return name.startswith(("<", "[")) and any(word in name.lower() for word in _SPARE)


def _tokens(target: TargetSpec) -> dict[str, int]:
    try:
        return tokenizer_tokens(target.folder)
    except TargetError as error:
        raise TargetError(f"{error}; set draft.mask_token_id") from None
