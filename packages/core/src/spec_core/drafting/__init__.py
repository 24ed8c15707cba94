"""Library for drafts: a draft served from a folder of config.json and model.safetensors, made of decoder layers.

Nothing here needs torch to be imported; parts of the network are in ``spec_core.drafting.network``.
"""

from spec_core.drafting.decoder_shape import (
    CapturedLayers,
    DecoderConfig,
    DecoderShape,
    decoder_fields,
    end_fields,
    head_fields,
    layer_range_problem,
    read_layers,
)
from spec_core.drafting.draft_files import (
    Json,
    Shapes,
    Size,
    architectures,
    as_served,
    checked,
    read_config,
    write_draft,
)
from spec_core.drafting.served_draft import EMBEDDING, DraftCheckpoint, ServedDraft, head_problem

__all__ = [
    "EMBEDDING",
    "CapturedLayers",
    "DecoderConfig",
    "DecoderShape",
    "DraftCheckpoint",
    "Json",
    "ServedDraft",
    "Shapes",
    "Size",
    "architectures",
    "as_served",
    "checked",
    "decoder_fields",
    "end_fields",
    "head_fields",
    "head_problem",
    "layer_range_problem",
    "read_config",
    "read_layers",
    "write_draft",
]
