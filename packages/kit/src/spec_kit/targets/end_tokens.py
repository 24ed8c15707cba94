"""Read the token ids at which servers end an answer of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core import read_json_object
from spec_core.errors import TargetError
from spec_kit.targets.tokenizer_tokens import tokenizer_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from spec_kit.targets.target_config import TargetConfig


def end_token_ids(config: TargetConfig) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, or else of config.json, and the tokenizer's.

    vLLM and SGLang stop at all of them. The tokenizer's may be no other file's, such as <|im_end|> of a fine-tuned
    base model. Source: ``update_from_generation_config`` of vLLM 0.32, ``_get_hf_eos_token_id`` of SGLang 0.5.23.
    """
    folder = config.file.parent
    file = folder / "generation_config.json"
    stored = read_json_object(file, TargetError).get("eos_token_id") if file.exists() else None
    own = config.token_ids("eos_token_id", config.get("eos_token_id"))
    ends = own if stored is None else config.token_ids(f"eos_token_id of {file.name}", stored)
    last = _tokenizers_end(folder)
    if last is None or last in ends or last >= config.integer("vocab_size"):
        return ends
    return (*ends, last)


def _tokenizers_end(folder: Path) -> int | None:
    """Return the id of the tokenizer's end token; None if its files do not say it."""
    file = folder / "tokenizer_config.json"
    settings = read_json_object(file, TargetError) if file.exists() else {}
    end: Any = settings.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if not isinstance(text, str):
        return None
    found = tokenizer_tokens(folder).get(text)
    return found if type(found) is int else None
