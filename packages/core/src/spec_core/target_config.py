"""The meaning of a target's config.json: one vocabulary for the many names that architectures use.

Only what decides the head, the embedding and a draft's shape is read. The rule for heads: the model types listed
here are known; any other type passes only as a plain one (RMS norm without bias, no key that hints at a scale or
a cap), and is refused rather than guessed otherwise.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

from spec_core.errors import TargetError
from spec_core.safetensors_index import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spec_core.target import NormKind

_GEMMA = frozenset({"gemma", "gemma2", "gemma3_text"})
_PLUS_ONE = _GEMMA | {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
_GRANITE = frozenset({"granite", "granitemoe"})
_COHERE = frozenset({"cohere", "cohere2"})
_LAYER = _COHERE | {
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "phi",
    "falcon",
    "bloom",
    "mpt",
    "stablelm",
    "starcoder2",
}
_PLAIN = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "phi3",
        "olmo2",
        "olmo3",
        "glm4",
    }
    | {"glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "smollm3", "exaone4", "seed_oss"}
)
_KNOWN = _PLUS_ONE | _GRANITE | _LAYER | _PLAIN

# A key with such a name may change the embedding or the logits; attention, routers and vision have scales too.
_HINT = re.compile(
    r"(logit|lm_head|emb|output)\w*(scal|mult|cap)|(scal|mult)\w*(logit|lm_head|emb|output)|mup|dim_model_base"
)
_NO_HINT = re.compile(r"att(n|ention)|router|vision|image|audio|num_")

# Kinds of RoPE scaling that need the length of pre-training; without their own, it is the model's longest.
_NEED_ORIGINAL_LENGTH = frozenset({"llama3", "yarn", "longrope"})
_LLAMA_THETA = 10000.0  # Llama's first configs were published without rope_theta


class TargetConfig:
    """config.json of ``folder``; a nested ``text_config`` lies over the top level."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise TargetError(f"target {folder} is not a folder")
        self.file = folder / "config.json"
        if not self.file.is_file():
            raise TargetError(f"target {folder} has no config.json")
        top = read_json(self.file)
        nested = top.get("text_config")
        self._values: dict[str, Any] = {**top, **(nested if isinstance(nested, dict) else {})}
        architectures: object = top.get("architectures")
        self.architecture = str(cast("list[str]", architectures)[0]) if architectures else ""
        self.model_type = str(self._values.get("model_type", ""))

    def get(self, *names: str) -> Any:
        """Value of the first name that is there and not null."""
        return next((found for name in names if (found := self._values.get(name)) is not None), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive integer under one of ``names``; TargetError where it is missing or something else."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TargetError(
                f"{self.file}: {names[0]}={value!r}, expected a positive integer ({', '.join(names)})"
            )
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number under one of ``names``; TargetError where it is missing or something else."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise TargetError(f"{self.file}: {names[0]}={value!r}, expected a number ({', '.join(names)})")
        return float(value)

    def norm(self, biased: bool) -> NormKind:
        """Kind of the final norm; ``biased``: the weights hold a bias for it."""
        if biased or self.model_type in _LAYER:
            return "layer"
        if self.model_type in _PLUS_ONE:
            return "rms_plus_one"
        if self.model_type in _KNOWN or self.get("rms_norm_eps") is not None:
            return "rms"
        raise TargetError(
            f"{self.file}: model_type {self.model_type!r} is not known and has no rms_norm_eps, "
            f"so the kind of its final norm cannot be told"
        )

    def check_head_is_known(self) -> None:
        """The rule of the module: TargetError for an unknown type that may not have a plain head."""
        if self.model_type in _KNOWN:
            return
        hints = [key for key, value in self._values.items() if _hints_at_scale(key, value)]
        if hints or "gemma" in self.model_type:
            why = f" and config.json sets {', '.join(sorted(hints))}" if hints else ""
            raise TargetError(
                f"{self.file}: model_type {self.model_type!r} is not known{why}, "
                f"so it cannot be told how its embedding and head are scaled"
            )

    def embedding_scale(self, hidden_size: int) -> float:
        if self.model_type in _GEMMA:
            return math.sqrt(hidden_size)
        return self.number("embedding_multiplier", default=1.0) if self.model_type in _GRANITE else 1.0

    def logit_scale(self) -> float:
        if self.model_type in _GRANITE:
            return 1.0 / self.number("logits_scaling", default=1.0)
        return self.number("logit_scale", default=1.0) if self.model_type in _COHERE else 1.0

    def logit_softcap(self) -> float | None:
        cap = self.get("final_logit_softcapping")
        return None if cap is None else self.number("final_logit_softcapping")

    def rope(self, max_positions: int) -> Mapping[str, Any]:
        """One flat mapping, as TargetSpec says; empty without RoPE; nested where it differs per layer type."""
        stored: dict[str, Any] = dict(self.get("rope_parameters", "rope_scaling") or {})
        if any(isinstance(value, dict) for value in stored.values()):
            return stored
        flat = self._flat_rope(stored, max_positions)
        local = self.get(
            "rope_local_base_freq"
        )  # Gemma 3's older spelling of a second base for its local layers
        if local is None:
            return flat
        return {"full_attention": flat, "sliding_attention": {"rope_theta": local, "rope_type": "default"}}

    def _flat_rope(self, stored: dict[str, Any], max_positions: int) -> dict[str, Any]:
        old_kind = stored.pop("type", None)
        theta = stored.pop("rope_theta", None) or self.get("rope_theta")
        if theta is None and self.model_type != "llama":
            return {}
        rope: dict[str, Any] = {
            "rope_theta": float(theta or _LLAMA_THETA),
            "rope_type": old_kind or "default",
        }
        partial = self.get("partial_rotary_factor")
        if partial is not None:
            rope["partial_rotary_factor"] = partial
        rope.update(stored)
        if rope["rope_type"] in _NEED_ORIGINAL_LENGTH:
            original = self.integer("original_max_position_embeddings", default=max_positions)
            rope.setdefault("original_max_position_embeddings", original)
        return rope


def _hints_at_scale(key: str, value: object) -> bool:
    neutral = value is None or value is False or value == 1
    return not neutral and bool(_HINT.search(key)) and not _NO_HINT.search(key)
