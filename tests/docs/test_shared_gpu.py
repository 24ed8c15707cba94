"""The table of docs/cuda.md about an 8B target on one GPU of 80 GB agrees with what ``plan`` computes."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import Draft, plugins
from spec_trainer.cli.commands.plan import describe_run
from spec_trainer.plan.activations import largest_pass_bytes, with_passes_that_fit
from spec_trainer.plan.memory import RunSizes, rank_parts, rooms
from spec_trainer.plan.resolve import read_inputs

from .recipes import CONFIGS, write_shapes

PAGE = (Path(__file__).parents[2] / "docs/cuda.md").read_text()
MEASURED = Path(__file__).parents[2] / "benchmarks/results/h200-document-length.json"
GIB = 1 << 30
DEVICE_BYTES = 81_559 << 20
"""Memory of an H100 with 80 GB, as NVML counts it."""
CONTEXT_BYTES = 3 * GIB // 2
QWEN3_8B = CONFIGS["Qwen/Qwen3-8B"]


class Gpu(CpuBackend):
    """The reference backend, as if it had the memory of a GPU."""

    @classmethod
    def capabilities(cls):
        return replace(
            super().capabilities(),
            memory_limit=True,
            device_ipc=True,
            device_bytes=DEVICE_BYTES,
            process_bytes=CONTEXT_BYTES,
        )


def write_target(folder: Path) -> None:
    """Write a config.json and a safetensors file with names, shapes and length as Qwen3-8B's, but without data."""
    config = QWEN3_8B
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries, keys = 128 * config["num_attention_heads"], 128 * config["num_key_value_heads"]
    layer = {
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [128],
        "self_attn.k_norm": [128], "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden], "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden], "mlp.down_proj": [hidden, wide],
    }  # fmt: skip
    shapes = {"model.embed_tokens": [config["vocab_size"], hidden], "lm_head": [config["vocab_size"], hidden]}
    shapes |= {"model.norm": [hidden]}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    (folder / "config.json").write_text(json.dumps(config))
    write_shapes(folder / "model.safetensors", {f"{name}.weight": shape for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-8b")
    write_target(folder)
    row = {"input_ids": [7] * 2048, "loss_mask": [0] * 614 + [1] * 1434}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    return folder


def planned(folder: Path, *words: str):
    """Return the run, colocated on one GPU of 80 GB."""
    here = [f"target={folder}", f"data.path={folder / 'rows.jsonl'}", f"output={folder / 'out'}"]
    here += ["data.eval_samples=0", "backend.name=cpu", "engine.name=hf", "placement.kind=colocated"]
    parts, dataset = read_inputs(None, {}, [*here, "train.dtype=bfloat16", *words])
    return with_passes_that_fit(replace(parts, backend=Gpu(Gpu.Config(name="cpu"))).with_dataset(dataset))


def figures(run) -> list[str]:
    """Return a row of the table: GiB of the limits, the window, what is needed, and what is left for activations."""
    sizes = RunSizes(run)
    engine, trainer = (room for room in rooms(run, sizes) if "part of a device" in room.name)
    left = trainer.free_bytes - trainer.least_bytes
    left += 4 * sizes.num_trained if run.config.train.accumulation == 1 else 0  # before there are gradients
    values = [
        run.window_bytes,
        engine.free_bytes,
        engine.least_bytes,
        engine.free_bytes - engine.least_bytes,
        trainer.least_bytes,
        left,
        largest_pass_bytes(run),
    ]
    return [f"{value / GIB:.1f}" for value in values]


ROWS = {
    cells[1].replace("`", ""): cells[2:-1]
    for line in PAGE.split("### An 8B target")[1].split("## MPS")[0].splitlines()
    if len(cells := [cell.strip() for cell in line.split("|")]) == 10 and cells[2][0].isdigit()
}
WORDS = {
    "Eagle3": [],
    "Eagle3, draft.vocab_size=32000": ["draft.vocab_size=32000"],
    "DFlash, train.accumulation=1": ["draft.name=dflash", "train.accumulation=1"],
    "DFlash": ["draft.name=dflash"],
}


@pytest.mark.parametrize("name", WORDS)
def test_the_table_says_what_plan_computes(folder, name):
    run = planned(folder, *WORDS[name])
    assert ROWS.keys() == WORDS.keys()
    assert ROWS[name] == figures(run)
    warnings = [text for text in describe_run(run)["warnings"] if "activations" in text]
    assert bool(warnings) == (name == "DFlash, train.accumulation=1")
    assert describe_run(run)["passes_per_step"] == (3 if name == "DFlash" else 1)
    assert all(" ".join(text.split()) in " ".join(PAGE.split()) for text in warnings)


def test_plan_says_how_many_layers_an_engine_runs_that_ends_early(folder):
    assert "layers_run" not in describe_run(planned(folder))
    assert describe_run(planned(folder, "draft.name=dflash"))["layers_run"] == (
        "34 of 36, which saves 5.6% of them"
    )
    assert "layers_run" not in describe_run(planned(folder, "draft.name=dflash", "draft.loss=soft"))


@pytest.mark.parametrize("draft", ["eagle3", "dflash"])
@pytest.mark.parametrize("saves", [False, True])
def test_what_is_counted_is_less_than_an_h200_has_taken(folder, draft, saves):
    words = {"eagle3": ["draft.vocab_size=32000"], "dflash": ["draft.name=dflash"]}[draft]
    run = planned(folder, *words, f"draft.checkpoint_activations={str(saves).lower()}")
    sizes, saved = RunSizes(run), run.draft.cost(run.target).saved_values
    static = sum(part.num_bytes for part in rank_parts(run, sizes)) - 4 * sizes.num_trained
    key = f"{draft}, checkpoint_activations={str(saves).lower()}"
    for row in json.loads(MEASURED.read_text())["lengths"][key]["rows"]:
        counted = static + 2 * saved(row["tokens"], int(0.7 * row["tokens"]))
        assert 0.5 < counted / (row["peak_mib"] * 2**20) < 1


DRAFTS = json.loads(MEASURED.with_name("h200-drafts-2.json").read_text())["after"]


@pytest.mark.parametrize(
    ("name", "row", "options"),
    [
        ("mtp", "mtp, 3 steps, 2048 x 4", {"num_steps": 3}),
        ("peagle", "peagle, 4 layers, 2048 x 4", {"vocab_size": 32000}),
        ("eagle3", "eagle3, 2 layers, 2048 x 4", {"num_layers": 2, "vocab_size": 32000}),
    ],
)
def test_what_other_drafts_save_is_less_than_a_step_has_taken(folder, name, row, options):
    """A step on an H200 has taken at most three times as much, with the weights in bfloat16."""
    target, plugin = planned(folder).target, plugins.load_available(Draft, name)
    draft = plugin(plugin.Config.model_validate({"name": name, **options}))
    weights = 2 * sum(map(prod, draft.cost(target).weight_shapes.values()))
    saved = 4 * 2 * draft.cost(target).saved_values(2048, int(0.7 * 2048))
    assert 1 < DRAFTS[row]["step_mib"] * 2**20 / (weights + saved) < 3
