"""How SGLang is told of a draft's folder: by the architecture that its config.json names.

``serving_formats.py`` has what every SGLang needs in a folder; here is what depends on the number of draft tokens
and on the version. Sources: ``arg_groups/speculative_hook.py``, ``models/dflash.py``, ``models/llama_eagle3.py`` of
0.5.16 and 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core.errors import ArtifactError, ConfigError
from spec_core.served_draft import ConfigReader, architectures, read_config
from spec_trainer.engines.sglang.versions import OLDEST, READS_DRAFT_CAUSALITY, installed

if TYPE_CHECKING:
    from pathlib import Path

_ALGORITHMS = {"LlamaForCausalLMEagle3": "EAGLE3", "DFlashDraftModel": "DFLASH"}
"""Architecture -> value of SGLang's ``speculative_algorithm``."""


def speculative_arguments(folder: Path, num_draft_tokens: int) -> dict[str, Any]:
    config = _read(folder)
    # A block is drafted in one pass, a chain in one for each token.
    steps = num_draft_tokens if _block_size(config) is None else 1
    return {
        "speculative_algorithm": _algorithm(config),
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        # A verification takes the last known token and all guesses.
        "speculative_num_draft_tokens": num_draft_tokens + 1,
    }


def check_speculation(folder: Path, num_draft_tokens: int) -> None:
    """Raises ArtifactError for a folder that the installed SGLang would not serve as it was trained, ConfigError for
    more draft tokens than the draft can propose."""
    config = _read(folder)
    _algorithm(config)
    _check_switches(config)
    block_size = _block_size(config)
    if num_draft_tokens < 1 or (block_size is not None and num_draft_tokens >= block_size):
        most = "or more" if block_size is None else f"to {block_size - 1}, its block of {block_size} less one"
        raise ConfigError(f"{num_draft_tokens} draft tokens are wanted, draft {folder} proposes 1 {most}")


def _read(folder: Path) -> ConfigReader:
    fields = read_config(folder)
    if fields is None:
        raise ArtifactError(f"draft {folder} has no config.json")
    return ConfigReader(fields, folder)


def _algorithm(config: ConfigReader) -> str:
    named = architectures(config.fields)
    for architecture, algorithm in _ALGORITHMS.items():
        if architecture in named:
            return algorithm
    raise config.error(f"architectures={sorted(named)}, SGLang is served {' or '.join(_ALGORITHMS)}")


def _block_size(config: ConfigReader) -> int | None:
    nested = config.fields.get("dflash_config")
    if nested is None:
        return None
    # SGLang's own default, where neither place has one.
    return ConfigReader({**config.fields, **nested}, config.folder).size("block_size", 16)


def _check_switches(config: ConfigReader) -> None:
    fields = config.fields
    if fields.get("norm_before_residual"):
        raise config.error("norm_before_residual=true, which SGLang does not read")
    if (installed() or OLDEST) >= READS_DRAFT_CAUSALITY:
        return
    if fields.get("norm_before_fc"):
        raise config.error("norm_before_fc=true, which this version of SGLang does not read")
    causal, layers = fields.get("is_causal"), fields.get("layer_types") or ["full_attention"]
    if causal is not None and {kind == "sliding_attention" for kind in layers} != {causal}:
        raise config.error(
            f"is_causal={str(causal).lower()} with layer_types={layers}, but this version of SGLang takes sliding "
            f"layers as causal and full ones as not"
        )
