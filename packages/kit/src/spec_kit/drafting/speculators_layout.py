"""Write a draft's folder in the layout of the library ``speculators``, which names the target beside the draft.

Such a config.json holds the fields of decoder layers in a nested object. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core import TargetSpec
from spec_core.errors import ArtifactError, ConfigError
from spec_kit.drafting.draft_files import Json, read_config
from spec_kit.drafting.quantised_draft import CONFIG, TENSORS

if TYPE_CHECKING:
    from spec_kit.drafting.served_draft import ServedDraft

KIND = "speculators_model_type"
"""Field with the algorithm's name in a config.json of this layout."""
LAYERS = "transformer_layer_config"
"""Field with the object of the decoder layers' fields."""
_ENGINES = frozenset({"architectures", "eagle_aux_hidden_state_layer_ids", "target_layer_ids", "pard_token"})
"""Fields of the engines' layout that have another name or place in this one."""
_VERSION = "0.9.0"
"""The version of speculators whose fields are written."""


def write_speculators(
    draft: ServedDraft[Any, Any],
    folder: Path,
    target: TargetSpec,
    output: Path,
    name: str,
    num_draft_tokens: int,
) -> None:
    """Write the export in ``folder`` as the new folder ``output``, in the layout of speculators.

    ``name``: the target, as a server finds it: a folder or a name of the hub. Raise ConfigError for a draft that has
    no place in this layout, and ArtifactError if ``output`` exists.
    """
    from safetensors.torch import load_file, save_file

    if not draft.speculators_type:
        raise ConfigError(
            f"the layout of speculators has no place for a draft {draft.name!r}; export it without --format"
        )
    if os.path.lexists(output):
        raise ArtifactError(f"{output} exists; choose a new folder")
    served = read_config(folder) or {}
    own = draft.to_speculators(served)
    elsewhere = own.keys() | _ENGINES | {draft.Shape.nested}
    layers = {key: value for key, value in served.items() if key not in elsewhere}
    fields: Json = {
        "architectures": [draft.speculators_architecture],
        **own,
        KIND: draft.speculators_type,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": draft.speculators_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {"name_or_path": name, "architectures": [target.architecture]},
        },
        LAYERS: layers,
    }
    tensors = load_file(folder / TENSORS)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    scratch = output.with_name(f".{output.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
    try:
        scratch.mkdir(parents=True)
        (scratch / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(renamed, scratch / TENSORS, metadata={"format": "pt"})
        scratch.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
