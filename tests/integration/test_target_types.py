"""Targets are read as transformers' model code computes them, for every type that is accepted."""

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spec_core import TargetSpec
from spec_core.errors import TargetError
from spec_core.records import FeatureSchema
from spec_engine_hf.hf_model import HfModel
from spec_kit.layers.rope import attention_scale, inverse_frequencies
from spec_kit.layers.target_ops import TargetOps
from spec_kit.targets.rope_parameters import rope_problem
from spec_kit.targets.target_reader import read_target, read_target_tensors
from spec_kit.targets.target_types import TARGET_TYPES, WRAPPERS

from ..docs.recipes import write_shapes
from .tiny_targets import HIDDEN, LAYERS, VOCABULARY, save_small_target, small_config, telling_options

ROOT = Path(__file__).parents[2]
GROUPS = 8
IDS = list(range(3, 20))
CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PARTS = set(WRAPPERS.values()) - CAUSAL  # text models that transformers has no head for by themselves
READ = sorted(name for name, kind in TARGET_TYPES.items() if kind.norm != "layer" and name not in PARTS)
# What a config.json always has. Everything else may be left out, and then transformers' default holds.
ESSENTIAL = {
    *("model_type", "text_config", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("layer_types", "attn_layer_indices", "mamba_n_heads", "layers_block_type"),
    *("eos_token_id", "pad_token_id", "image_token_id"),
}
# Of a rope_scaling with the oldest key, "type", these take the factor and no kind: we take both.
FLAT_ROPE_UNHEARD = frozenset({"mimo_v2_flash"})
"""Types whose published config.json has flat rotary values, which transformers replaces by equal defaults."""
TYPE_KEY_UNHEARD = {"gemma3", "gemma3_text", "olmo3"}

# Without an epsilon it has layer norms; of the scalings, transformers refuses all but its own.
REFUSED_SPARSE: dict[str, set[str]] = {"cohere2_moe": set(), "gemma4": set(), "phi3": {"rope_scaling"}}


def here(names: Iterable[str]) -> list[str]:
    """An older transformers does not know every type; what it does not know is not compared."""
    return [name for name in names if name in CONFIG_MAPPING]


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize(
    "options_of",
    [telling_options, pytest.param(lambda _: {}, marks=pytest.mark.slow)],
    ids=["telling", "usual"],
)
def test_every_accepted_type_is_read_as_its_model_code_computes(group, options_of, tmp_path):
    problems = {}
    for name in here([*READ, *WRAPPERS])[group::GROUPS]:
        save_small_target(tmp_path / name, small_config(name, **options_of(name)))
        problems |= {(name, what): error for what, error in differences(tmp_path / name).items()}
    assert not problems


def differences(folder: Path) -> dict[str, float]:
    """Return, by what is compared, the largest difference relative to the largest value, where it is above 1e-5."""
    target = read_target(folder)
    model = HfModel(target, torch.device("cpu"), "float32")
    schema = FeatureSchema(layers=tuple(range(LAYERS + 1)), hidden_size=target.hidden_size, dtype="float32")
    states_TNH = model.states([IDS], schema)[0]
    with torch.no_grad():
        theirs = model.causal_lm(torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    ops = TargetOps(target, read_target_tensors(target), torch.device("cpu"), torch.float32)
    pairs = {
        "logits": (ops.teacher_logits(states_TNH[:, LAYERS]), theirs.logits[0]),
        "embedding": (ops.embed(torch.tensor(IDS)) * target.embedding_scale, states_TNH[:, 0]),
    }
    for layer in range(LAYERS):
        pairs[f"state {layer}"] = (states_TNH[:, layer], theirs.hidden_states[layer][0])
    pairs |= rotary_pairs(target, model.causal_lm)
    found = {what: relative(ours, other) for what, (ours, other) in pairs.items()}
    return {what: error for what, error in found.items() if not error < 1e-5}


def rotary_pairs(target: TargetSpec, model: torch.nn.Module) -> dict[str, Any]:
    """Frequencies and scale of the model's rotary module, those of full attention where there are several; nothing
    where a draft cannot have them, which ``plan`` says."""
    if rope_problem(target.rope, target.head_dim):
        return {}
    for module in model.modules():
        names = [name for name in ("full_attention_inv_freq", "inv_freq") if hasattr(module, name)]
        if names:
            theirs = getattr(module, names[0])
            scale = getattr(module, names[0].replace("inv_freq", "attention_scaling"))
            ours = inverse_frequencies(target.rope, 2 * len(theirs), target.max_positions)
            return {
                "frequencies": (ours, theirs),
                "scale": (
                    torch.tensor([attention_scale(target.rope, target.max_positions)]),
                    torch.tensor([scale]),
                ),
            }
    return {}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


OLD_SPELLINGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 123456.0},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 123456.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
]


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", here([*READ, *WRAPPERS]))
def test_what_a_config_leaves_out_is_what_transformers_takes(name, tmp_path):
    """As it is, and as transformers writes it out in whole: both are read alike, or the sparse one is refused."""
    small_config(name).save_pretrained(tmp_path)
    shapes = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    save_file(
        {f"model.{leaf}.weight": torch.zeros(shape) for leaf, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    file = tmp_path / "config.json"
    sparse = without_defaults(json.loads(file.read_text()))
    for spelling in OLD_SPELLINGS[:1] if name in FLAT_ROPE_UNHEARD else OLD_SPELLINGS:
        written = {**sparse, "text_config": {**sparse["text_config"], **spelling}} if name in WRAPPERS else {}
        file.write_text(json.dumps(written or {**sparse, **spelling}))
        if TARGET_TYPES[WRAPPERS.get(name, name)].needs_rope and not is_whole(spelling):
            with pytest.raises(TargetError, match="rope_"):
                read_target(tmp_path)
        elif name in REFUSED_SPARSE and REFUSED_SPARSE[name] <= spelling.keys():
            with pytest.raises(TargetError, match="=None, expected"):
                read_target(tmp_path)
        elif name not in TYPE_KEY_UNHEARD or "type" not in spelling.get("rope_scaling", {}):
            read = described(read_target(tmp_path))
            with contextlib.suppress(StrictDataclassError, KeyError):  # phi3 and others know one scaling only
                write_out(tmp_path)
            assert described(read_target(tmp_path)) == read, spelling


GEMMA_3 = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
SPARSE = {
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": GEMMA_3 | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    },
    "google/gemma-3-12b-it": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": GEMMA_3
        | {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
    },
    **{
        name: {"model_type": name}
        for name in (
            *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "phi3", "glm4", "glm4_moe"),
            *("deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text"),
        )
    },
    "gemma3": {"model_type": "gemma3", "text_config": {}},
}
"""Gemma 3's own files, and those of other families without any key that they might leave out."""


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", SPARSE)
def test_shapes_that_a_config_leaves_out_are_those_of_transformers(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SPARSE[name]))
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
    wide = [theirs.vocab_size, theirs.hidden_size]
    write_shapes(
        tmp_path / "model.safetensors", {"model.embed_tokens.weight": wide, "model.norm.weight": wide[1:]}
    )
    target = read_target(tmp_path)
    own_head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (target.vocab_size, target.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert target.num_layers == theirs.num_hidden_layers
    assert (target.num_heads, target.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert target.head_dim == own_head_dim
    assert target.intermediate_size == theirs.intermediate_size
    assert target.max_positions == theirs.max_position_embeddings
    assert target.norm_eps == theirs.rms_norm_eps
    activation = "hidden_activation" if "gemma" in name else "hidden_act"
    assert target.hidden_act == getattr(theirs, activation)


def is_whole(rope: dict[str, Any]) -> bool:
    return "rope_theta" in rope and "rope_scaling" in rope


def write_out(folder: Path) -> None:
    whole = AutoConfig.from_pretrained(folder)
    whole.tie_word_embeddings = True  # there is no head in this folder
    whole.save_pretrained(folder)


def without_defaults(config: dict[str, Any]) -> dict[str, Any]:
    essential = {key: value for key, value in config.items() if key in ESSENTIAL}
    return {
        key: without_defaults(value) if isinstance(value, dict) else value for key, value in essential.items()
    }


def described(target: TargetSpec) -> dict[str, Any]:
    wanted = ("norm", "norm_eps", "embedding_scale", "logit_scale", "logit_softcap", "max_positions")
    wanted += ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "hidden_act")
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0, **target.rope}
    return {name: getattr(target, name) for name in wanted} | {"rope": rope}


def test_table_holds_the_causal_types_of_transformers_only():
    unknown = [name for name in TARGET_TYPES if name in CONFIG_MAPPING and name not in CAUSAL | PARTS]
    assert unknown == []


@pytest.mark.parametrize("name", sorted(name for name in CAUSAL if name not in READ and name not in WRAPPERS))
def test_every_other_type_is_refused_in_one_line(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": None}))
    with pytest.raises(TargetError) as caught:
        read_target(tmp_path)
    assert "\n" not in str(caught.value)


def test_page_lists_what_is_accepted():
    """The first cell of a row of docs/targets.md names all types that are read alike."""
    page, _, _ = (ROOT / "docs" / "targets.md").read_text().partition("## Multimodal targets")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell) if name != "model_type"]
    assert sorted(listed) == sorted({*TARGET_TYPES, *WRAPPERS})
