"""Targets with a head of their own: ``export --whole-target`` of what links, pipes and devices may stand in, and runs
that start from the head, or from none."""

import json
import os
import random
from pathlib import Path

from . import damage, material, special_files

_SIZES = {
    "vocab_size": material.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "layer_types": ["full_attention"] * 4, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_HEAD = "mtp.safetensors"


def build(root: Path) -> None:
    """Write ``headed``, a target one of whose files has its head, and ``headed-run``, which trained the head."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from spec_draft_mtp.config import MtpConfig
    from spec_draft_mtp.shape import MtpShape
    from spec_kit.targets.target_reader import read_target
    from spec_trainer.cli.app import run

    folder = root / "headed"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3_5_text", **_SIZES)
    )
    model.save_pretrained(folder, max_shard_size="60KB")
    for file in (root / "target").glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    shapes = MtpShape.for_target(MtpConfig(), read_target(folder)).tensor_shapes()
    save_file({name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}, folder / _HEAD)
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] |= dict.fromkeys(shapes, _HEAD)
    index.write_text(json.dumps(found))
    words = [
        "--target",
        folder,
        "--data",
        root / "tokens.jsonl",
        "--output",
        root / "headed-run",
        "train.steps=2",
    ]
    assert run([*map(str, words), "draft.name=mtp", "draft.num_steps=2", f"draft.init_from={folder}"]) == 0


def whole_target(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object], Path]:
    """Draw an export of the whole target, a copy of which holds something else as well, or a run of its head."""
    target, output = material.copy(root, "headed", folder), folder / "exported"
    how = draw.choice([_link, _link, _special, _special, _deep, _damage, _none])
    what = how(target, draw)
    if draw.random() < 0.2:
        init = draw.choice([[], [f"draft.init_from={target}"]])
        words = ["plan", "--target", target, "--data", root / "tokens.jsonl", "--output", output]
        return f"plan: {what}", [*words, "draft.name=mtp", *init], folder / "nothing"
    place = draw.choice(
        [output, output, output, target / "inside", target, folder / "down" / "there", "exported"]
    )
    if draw.random() < 0.1:
        place = folder / "link"
        place.symlink_to(draw.choice([target, output, folder]))
    words = ["export", "--checkpoint", root / "headed-run" / "checkpoints" / "step-2", "--whole-target"]
    changes = folder / "down" if place == folder / "down" / "there" else output
    return f"export to {place}: {what}", [*words, "--target", target, "--output", place], changes


def _link(target: Path, draw: random.Random) -> str:
    """A link, in place of a file or beside the files."""
    outside = target.parent / "id_rsa"
    outside.write_text("secret")
    blobs = target.parent / "blobs"
    blobs.mkdir()
    goal = draw.choice(
        [
            outside, "../id_rsa", "/dev/zero", "/dev/urandom", "/dev/stdin", "/proc/self/mem", "/proc/self/fd", "..",
            ".", "/", "config.json", "nowhere", target, blobs, "/sys", "~/.ssh", "x" * 255,
        ]
    )  # fmt: skip
    name = draw.choice(
        ["x", "sub/x", "README.md", "generation_config.json", "config.json", _HEAD, ".x", "a\nb", "\udcff"]
    )
    file = target / name
    file.parent.mkdir(exist_ok=True)
    if file.exists() and draw.random() < 0.5:
        file.rename(blobs / file.name)
        goal = blobs / file.name
    file.unlink(missing_ok=True)
    file.symlink_to(goal)
    return f"{name!r} is a link to {goal}"


def _special(target: Path, draw: random.Random) -> str:
    name = draw.choice(["x", "sub/x", "README.md", "tokenizer.json", "config.json", _HEAD])
    return special_files.put(target / name, draw)


def _deep(target: Path, draw: random.Random) -> str:
    """Folders within folders, with a file, a link to above, or a pipe in the last."""
    levels, place = draw.choice([1, 30, 200]), target
    for _ in range(levels):
        place /= "d"
    place.mkdir(parents=True)
    last = draw.choice(["file", "up", "pipe", "nothing"])
    if last == "file":
        (place / "file").write_text("x")
    elif last == "up":
        (place / "up").symlink_to(target)
    elif last == "pipe":
        os.mkfifo(place / "pipe")
    return f"{levels} folders, then {last}"


def _damage(target: Path, draw: random.Random) -> str:
    file = draw.choice([target / _HEAD, target / "config.json", target / "model.safetensors.index.json"])
    structured = damage.damage_header if file.suffix == ".safetensors" else damage.damage_json_file
    return damage.choose(file, draw, structured)


def _none(target: Path, draw: random.Random) -> str:
    """The target has no head any more, or two of them."""
    index = target / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    names = [name for name, file in found["weight_map"].items() if file == _HEAD]
    for name in draw.sample(names, draw.choice([1, len(names)])):
        del found["weight_map"][name]
    index.write_text(json.dumps(found))
    return "tensors of the head are not in the index"
