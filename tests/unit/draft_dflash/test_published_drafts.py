"""Published DFlash drafts of both styles are read."""

from functools import partial

from spec_draft_dflash.draft import DFlashDraft

from .. import draft_folders
from ..draft_folders import QWEN3_FIELDS, assert_same_weights, read_fields, rename_tensors, write_fields
from ..draft_parts import make_target
from . import cases

FULL, SLIDING = "full_attention", "sliding_attention"


export = partial(draft_folders.export, cases)


COMMON = {
    **QWEN3_FIELDS, "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 3, "initializer_range": 0.02, "num_target_layers": 36, "use_cache": True,
}  # fmt: skip


def test_published_draft_of_the_old_style_is_read(tmp_path):
    """Block size at the top, full layers with a base configuration's unused window, flat rope_theta."""
    fields = {
        **COMMON,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 20, "target_layer_ids": [1, 9, 17, 25, 33]},
        "layer_types": [FULL] * 5,
        "max_window_layers": 5,
        "num_hidden_layers": 5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    target = make_target(num_layers=36)
    module = export(tmp_path, target, num_layers=5, block_size=16)
    write_fields(tmp_path, fields)
    again = assert_same_weights(DFlashDraft, tmp_path, module, target)
    assert (again.shape.block_size, again.shape.mask_token_id, again.shape.windows) == (16, 20, (None,) * 5)
    assert again.shape.rope == {"rope_type": "default", "rope_theta": 1000000}
    assert DFlashDraft.from_folder(tmp_path).required_features(target).layers == (2, 10, 18, 26, 34)


def test_published_draft_of_the_new_style_is_read(tmp_path):
    """Everything nested, sliding layers before a full one, tied, rope_parameters, prefixed names."""
    types = [*[SLIDING] * 3, FULL]
    fields = {
        **COMMON,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 27,
            "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29],
        },
        "layer_types": types,
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": 4096,
        "use_sliding_window": True,
        "tie_word_embeddings": True,
    }
    layers = tuple(range(2, 31, 4))
    target = make_target(num_layers=36)
    module = export(
        tmp_path, target, layer_types=tuple(types), sliding_window=4096, layers=layers, num_layers=4
    )
    write_fields(tmp_path, fields)
    rename_tensors(tmp_path, lambda name: f"model.{name}")
    again = assert_same_weights(DFlashDraft, tmp_path, module, target)
    assert again.shape.windows == (4096, 4096, 4096, None)
    assert (again.shape.block_size, again.shape.mask_token_id) == (16, 27)
    assert DFlashDraft.from_folder(tmp_path).required_features(target).layers == layers


def test_draft_without_layer_ids_has_as_many_default_features_as_layers(tmp_path):
    export(tmp_path, make_target(num_layers=36), num_layers=3, num_features=3)
    fields = {"eagle_aux_hidden_state_layer_ids": None, "dflash_config": {"mask_token_id": 4}}
    write_fields(tmp_path, read_fields(tmp_path) | fields)
    draft = DFlashDraft.from_folder(tmp_path)
    assert draft.required_features(make_target(num_layers=36)).layers == (2, 18, 34)
