"""The table of docs/cost.md agrees with its formulas, the recipes, and transformers' models of the targets."""

import json
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
import yaml

from spec_core import Draft
from spec_core.plugins import load
from spec_kit.targets import read_target

from .recipes import CONFIGS, RECIPES, text_config, write_tensors

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/cost.md").read_text()
FLOPS = 5.5e14
TOKENS = 1e8
ROWS = {
    cells[1]: [float(cell.replace(",", "")) for cell in cells[3:8]]
    for line in PAGE.splitlines()
    if len(cells := [cell.strip(" `") for cell in line.split("|")]) > 8 and cells[1].endswith(".yaml")
}
"""Recipe -> N and D in 10^9, epochs, GPU hours of training, GPU hours of regenerate."""


def target_sizes(config: dict) -> tuple[float, float]:
    """Return the weights of the layers that a token passes, and all weights of the text model."""
    with TemporaryDirectory() as folder:
        known = {"model_type": "deepseek_v3"} if config["model_type"] == "kimi_k2" else {}
        Path(folder, "config.json").write_text(json.dumps(config | known))
        text = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    with torch.device("meta"):
        model = _text_model(text)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 0)
    share = text.num_experts_per_tok / experts if experts else 1.0
    layers = sum(
        parameter.numel() * (share if ".experts." in name else 1)
        for name, parameter in model.named_parameters()
        if ".layers." in f".{name}" and parameter.ndim > 1
    )
    return layers, sum(parameter.numel() for parameter in model.parameters())


def _text_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Return the text model; transformers has that of Qwen3-VL without a head, whose weights are added."""
    if config.model_type != "qwen3_vl_text":
        return transformers.AutoModelForCausalLM.from_config(config)
    model = transformers.AutoModel.from_config(config)
    model.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return model


def draft_flops(values: dict, config: dict) -> float:
    """Return the FLOPs of a training step for each token, as the page counts them."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        write_tensors(Path(folder), config)
        target = read_target(Path(folder))
        draft_type = load(Draft, values["draft"]["name"])
        options = draft_type.Config(**values["draft"])
        shapes = draft_type(options).cost(target).weight_shapes
    of_features = prod(shapes["fc.weight"])
    others = sum(prod(shape) for name, shape in shapes.items() if len(shape) > 1) - of_features
    if values["draft"]["name"] == "eagle3":
        return 6 * (of_features + options.num_steps * others)
    rows_per_token = options.num_anchors * (options.block_size or 16) / 2048
    head = text_config(config)["vocab_size"] * target.hidden_size
    return 6 * of_features + rows_per_token * (6 * others + 4 * head)


@cache
def computed(recipe: Path) -> list[float]:
    values = yaml.safe_load(recipe.read_text())
    config = CONFIGS[values["target"]]
    layers, weights = target_sizes(config)
    draft, epochs = draft_flops(values, config), values["train"]["epochs"]
    sparse = 2 if _is_sparse(config) else 1
    training = TOKENS * epochs * (2 * layers * sparse + draft) / FLOPS / 3600
    size = {"fp8": 1.0, "mxfp4": 0.66}.get(config.get("quantization_config", {}).get("quant_method"), 2.0)
    answers = TOKENS / 64 * 0.010 * weights * size / 16.4e9 / 3600
    return [layers / 1e9, draft / 1e9, epochs, training, answers]


def _is_sparse(config: dict) -> bool:
    return any("experts" in key for key in text_config(config))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_row_of_a_recipe_is_what_the_formulas_give(recipe):
    assert ROWS[recipe.name] == pytest.approx(computed(recipe), rel=0.06)
