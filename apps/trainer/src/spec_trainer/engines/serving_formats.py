"""What vLLM and SGLang each need in a draft folder, beyond what its plugin has checked.

A folder can be whole, and still be read in another way, or crash an engine, because the engines' parsers differ;
docs/evaluation.md has the table of fields, versions and how each is known. Torch is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_core.served_draft import architectures, read_config, read_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core.served_draft import Json
    from spec_core.target import TargetSpec

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_CHAIN = "LlamaForCausalLMEagle3"
_CHAINS = {_CHAIN, "Eagle3LlamaForCausalLM", "LlamaForCausalLM"}
"""One autoregressive layer. vLLM makes the second name of the third, and has both in its table; SGLang has the first
only."""
_BLOCK = "DFlashDraftModel"


@dataclass(frozen=True)
class _Served:
    """A folder as an engine's parser sees it."""

    fields: Json
    tensors: frozenset[str]
    target: TargetSpec

    @property
    def chain(self) -> bool:
        return bool(architectures(self.fields) & _CHAINS)

    @property
    def block(self) -> bool:
        return _BLOCK in architectures(self.fields)

    def nested(self, section: str, key: str) -> object:
        return (self.fields.get(section) or {}).get(key)


_Check = tuple[str, "Callable[[_Served], bool]"]

_VLLM: tuple[_Check, ...] = (
    (
        "its tensors have the prefix model., which vLLM adds itself; write their names without it",
        lambda draft: any(name.startswith("model.") for name in draft.tensors),
    ),
    (
        "it names its layers in eagle_config only, where vLLM reads them as other layers or not at all; write "
        f"{_LAYERS} at the top level too, each one larger",
        lambda draft: (
            draft.chain and bool(draft.nested("eagle_config", _LAYERS)) and not draft.fields.get(_LAYERS)
        ),
    ),
    (
        "it has a d2t although its vocabulary is the target's; vLLM has no place for it: remove it",
        lambda draft: (
            "d2t" in draft.tensors and draft.fields.get("draft_vocab_size") in (None, _vocab(draft))
        ),
    ),
    (
        "its config.json has no dflash_config.mask_token_id, where vLLM looks for it",
        lambda draft: draft.block and draft.nested("dflash_config", "mask_token_id") is None,
    ),
    (
        "its config.json has no dflash_config.target_layer_ids, where vLLM looks for them",
        lambda draft: draft.block and not draft.nested("dflash_config", "target_layer_ids"),
    ),
)
_MIXED: _Check = (
    "some of its layers are sliding and some full, which only vLLM's second model runner takes; vLLM for processors "
    "has the first",
    lambda draft: draft.block and len(set(draft.fields.get("layer_types") or ())) > 1,
)
_SGLANG: tuple[_Check, ...] = (
    (
        f"its architecture is one that only vLLM knows; SGLang serves the same draft as {_CHAIN}",
        lambda draft: draft.chain and _CHAIN not in architectures(draft.fields),
    ),
    (
        "its config.json has no draft_vocab_size, which SGLang needs also where it is the target's",
        lambda draft: draft.chain and draft.fields.get("draft_vocab_size") is None,
    ),
    (
        f"it names its layers at the top level only, which SGLang does not read; write {_LAYERS} into "
        "eagle_config too, each one smaller",
        lambda draft: (
            draft.chain
            and not draft.nested("eagle_config", _LAYERS)
            and draft.fields.get(_LAYERS) not in (None, _default_layers(draft.target))
        ),
    ),
    (
        "its config.json has no dflash_config.mask_token_id, where SGLang looks for it",
        lambda draft: draft.block and draft.nested("dflash_config", "mask_token_id") is None,
    ),
    (
        "its config.json has no num_target_layers; SGLang 0.5.16 takes the draft's own number of layers instead",
        lambda draft: (
            draft.block
            and draft.fields.get("num_target_layers") is None
            and draft.nested("dflash_config", "num_target_layers") is None
        ),
    ),
)


def check_for_vllm(folder: Path, target: TargetSpec, for_processors: bool = False) -> None:
    """Raises ArtifactError, one line, for a draft that vLLM 0.26 to 0.33 would refuse or read differently."""
    _check("vLLM", (*_VLLM, _MIXED) if for_processors else _VLLM, folder, target)


def check_for_sglang(folder: Path, target: TargetSpec) -> None:
    """Likewise for SGLang from 0.5.16 on."""
    _check("SGLang", _SGLANG, folder, target)


def check_for_both(folder: Path, target: TargetSpec) -> None:
    """For an export. A format that is in neither engine's list here (a stranger's) is the stranger's to check."""
    if read_config(folder) is not None:
        check_for_vllm(folder, target)
        check_for_sglang(folder, target)


def _check(engine: str, checks: Sequence[_Check], folder: Path, target: TargetSpec) -> None:
    fields = read_config(folder)
    if fields is None:
        raise ArtifactError(f"draft {folder} cannot be served by {engine}: it has no config.json")
    draft = _Served(fields, frozenset(read_shapes(folder)), target)
    for problem, applies in checks:
        if applies(draft):
            raise ArtifactError(f"draft {folder} cannot be served by {engine}: {problem}")


def _vocab(draft: _Served) -> object:
    return draft.fields.get("vocab_size")


def _default_layers(target: TargetSpec) -> list[int]:
    """What SGLang taps for a chain that names no layers."""
    return [2, target.num_layers // 2, target.num_layers - 3]
