"""Cases: something of the material damaged, and a command that reads it; and what every command promises."""

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import (
    benches,
    combined,
    damage,
    images,
    material,
    numbers,
    outputs,
    rows,
    run_directories,
    servers,
    special_files,
    templates,
    whole_targets,
)

LONGEST_LINE = 2_000
LONGEST_S = 60
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [DIWEC] ")

_KEYS = [
    "target", "output", "seed", "backend", "backend.name", "data.path", "data.eval_path", "data.eval_samples",
    "data.features", "data.max_length", "data.packing", "data.on_bad_row", "draft", "draft.name", "draft.init_from",
    "draft.num_steps", "draft.layers", "draft.vocab_size", "train", "train.lr", "train.steps", "train.epochs",
    "optimizer.betas", "train.schedule", "train.ranks", "train.global_batch_tokens", "engine.name",
    "engine.batch_tokens", "engine.replicas", "placement.kind", "placement.window_bytes", "timeouts.peer_s",
    "capture.shard_bytes", "profile.steps", "track.wandb", "x", "x.y.z", "a..b", "data[path]", "",
]  # fmt: skip
_TEXTS = [
    "", " ",
    "null", "~", "true", "off", "0", "1", "-1", "1e-4", ".nan", "1e400", "9" * 25, "9" * 5_000, "0x" + "f" * 5_000,
    "[", "[]", "{}", "[1,2]", "{a: 1}", "[" * 50_000, "{a: " * 9_000, "- " * 9_000, "!!int x", "!!bool x",
    "!!python/object/apply:os.system [id]", "&a [*a]", "*a", "x" * 70_000, "\x1b[31m", "\udcff", "a\nb", "\x00",
    "${seed}", "${", "???", "/dev/zero",
    "/etc/passwd",
    "../..", ".", "nowhere", "nobody/nothing", "a" * 300, "eagle3", "dflash", "hf", "inline", "10000000",
]  # fmt: skip
_WRONG_WORDS = {"words", "numbers", "servers", "benchmarks", "combined"}
"""Groups whose words are what is damaged."""


@dataclass(frozen=True)
class Case:
    """``words`` of a command line, to be run in ``folder``, which has to stay as it is."""

    group: str
    what: str
    words: list[str]
    folder: Path
    may_change: Path
    """The one part of it that may change."""
    root: Path


def make_case(root: Path, folder: Path, draw: random.Random, groups: Sequence[str] | None = None) -> Case:
    """Draws one, of ``groups`` or of any. ``folder`` must not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    group = draw.choice(list(groups or _GROUPS))
    what, words, *may_change = _GROUPS[group](root, folder, draw)
    return Case(group, what, list(map(str, words)), folder, *(may_change or [folder / "nothing"]), root)


def violations(case: Case, code: int, out: str, err: str) -> list[str]:
    """Return the promises that a command has broken, and whether the case itself is a wrong command line."""
    words = case.words
    plans, reports = words[0] == "plan", servers.reports_on_output(words, code, err)
    lines = [line for line in err.splitlines() if not _LOG_LINE.match(line)]
    found = servers.violations(words, out) if reports else []
    if code not in ((0, 2) if plans else (0, 1, 2)):
        found.append(f"exit code {code}")
    if code != 0 and not reports and (len(lines) != 1 or not lines[0].startswith("spec-trainer: error: ")):
        found.append(f"{len(lines)} lines instead of one")
    if "Traceback" in err or "Traceback" in out:
        found.append("a traceback")
    if "unforeseen" in err:
        found.append("an error that nobody foresaw")
    if any(len(line) > LONGEST_LINE for line in lines):
        found.append("a long line")
    if "\x1b" in err + out:
        found.append("an escape code")
    if "--help" in err and case.group not in _WRONG_WORDS:
        found.append("a command line that no command takes")
    return found


def contents(case: Case) -> list[tuple[str, int]]:
    """Return path and size of everything that the command may not change."""
    return listing(case.folder, case.may_change)


def listing(folder: Path, left_out: Path | None = None) -> list[tuple[str, int]]:
    """Return path and size of everything in ``folder``, except for ``left_out`` and what is in it."""
    return sorted(
        (str(path), path.lstat().st_size if not path.is_dir() else 0)
        for path in folder.rglob("*")
        if path != left_out and left_out not in path.parents
    )


def changes(case: Case, before: list[tuple[str, int]]) -> list[str]:
    """Return what the command has changed and should not have, a line each."""
    found = ["something was created or removed"] if contents(case) != before else []
    return found + run_directories.page_problems(case.root, case.may_change)


def _plan(root: Path, folder: Path, **keys: object) -> list[object]:
    given = {"target": root / "target", "data": root / "tokens.jsonl", "output": folder / "out"} | keys
    return ["plan", *(word for key, value in given.items() for word in (f"--{key}", value))]


def _data(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    name = draw.choice(["rows.jsonl", "tokens.jsonl", "tokens.jsonl", "rows.json", "rows.parquet"])
    file = material.copy(root, name, folder)
    structured = {".jsonl": [damage.damage_rows], ".json": [damage.damage_json_file], ".parquet": []}[
        file.suffix
    ]
    what = damage.choose(file, draw, *structured)
    words = ["data.on_bad_row=skip"] if draw.random() < 0.3 else []
    return what, [*_plan(root, folder, data=file), *words]


def _target(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    target = material.copy(root, "target", folder)
    file = draw.choice(
        sorted(target.glob("*.json")) + [target / "config.json"] * 4 + sorted(target.glob("*.safetensors"))
    )
    structured = damage.damage_header if file.suffix == ".safetensors" else damage.damage_json_file
    what = damage.choose(file, draw, structured)
    reads_tokenizer = file.name.startswith("token") or draw.random() < 0.2
    data = root / ("rows.jsonl" if reads_tokenizer else "tokens.jsonl")
    return what, _plan(root, folder, target=target, data=data)


def _quantized(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    target = material.copy(root, "target", folder)
    values = [*damage.ODD_VALUES, {"quant_method": draw.choice([*damage.ODD_VALUES, *_QUANTIZED])}]
    typed = {
        "quant_method": draw.choice(_QUANTIZED),
        draw.choice(_QUANTIZED_KEYS): draw.choice(damage.ODD_VALUES),
    }
    dtyped = {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": draw.choice(_DTYPES)}
    value = draw.choice([*values, *[typed] * 20, *[dtyped] * 5])
    place = draw.choice(["config.json", "config.json", "text_config", "hf_quant_config.json"])
    fields = json.loads((target / "config.json").read_text())
    if place == "hf_quant_config.json":
        text = draw.choice([json.dumps(value), json.dumps({"quantization": value}), "{", "[" * 100_000, ""])
        (target / place).write_text(text)
    else:
        inner = fields if place == "config.json" else fields.setdefault("text_config", {**fields})
        inner["quantization_config"] = value
        (target / "config.json").write_text(json.dumps(fields))
    words = _plan(root, folder, target=target)
    if draw.random() < 0.2:
        prompts = ["--draft-model", root / "eagle3", "--prompts", root / "tokens.jsonl", "--no-untrained"]
        words = ["evaluate", "--target", target, *prompts, "--max-new-tokens", 1]
    return f"{place}: {str(value)[:60]}", words


def _draft(algorithm: str, root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    draft = material.copy(root, algorithm, folder)
    file = draw.choice([draft / "config.json", draft / "model.safetensors"])
    structured = damage.damage_header if file.suffix == ".safetensors" else damage.damage_json_file
    what = damage.choose(file, draw, structured)
    if draw.random() < 0.7:
        return what, [*_plan(root, folder, draft=algorithm), f"draft.init_from={draft}"]
    words = ["--target", root / "target", "--draft-model", draft, "--prompts", root / "tokens.jsonl"]
    return what, ["evaluate", *words, "--max-new-tokens", 1, "--temperature", 0, "--no-untrained"]


def _features(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    features = material.copy(root, "features", folder)
    file = draw.choice([features / "index.json", *sorted(features.glob("*.safetensors"))])
    structured = damage.damage_header if file.suffix == ".safetensors" else damage.forge_index
    what = damage.choose(file, draw, structured)
    if draw.random() < 0.3:
        return what, ["capture", "--verify", features]
    return what, [*_plan(root, folder), "data.eval_samples=2", f"data.features={features}"]


def _yaml(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    file = material.copy(root, "run.yaml", folder)
    if draw.random() < 0.4:
        return damage.choose(file, draw), ["plan", "--config", file]
    lines = file.read_text().splitlines()
    number = draw.randrange(len(lines))
    text = draw.choice(_TEXTS)
    lines[number] = lines[number].partition(":")[0] + ": " + text
    file.write_text("\n".join(lines), errors="surrogateescape")
    return f"run.yaml:{number + 1}: {text[:40]}", ["plan", "--config", file]


def _words(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    words = [f"{draw.choice(_KEYS)}={draw.choice(_TEXTS)}" for _ in range(draw.choice([1, 1, 2]))]
    if draw.random() < 0.2:
        words = [
            draw.choice(["--target", "--data", "--output", "--config", "--lr", "--draft"]),
            draw.choice(_TEXTS),
        ]
    return " ".join(word[:50] for word in words), [*_plan(root, folder), *words]


_QUANTIZED_KEYS = [
    "bits", "group_size", "weight_block_size", "quant_algo", "quant_type", "config_groups", "ignore", "format",
    "ignored_layers", "modules_to_not_convert", "quantization_config", "producer", "kv_cache_quant_algo", "desc_act",
    "load_in_4bit", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype", "activation_scheme", "version", "backend",
]  # fmt: skip
_QUANTIZED = ["fp8", "awq", "gptq", "modelopt", "bitsandbytes", "compressed-tensors", "mxfp4", "os.system"]
_DTYPES = ["os.system", "float17", "", 3, None, "__class__", "float32", "nn"]
_GROUPS: dict[str, Callable[[Path, Path, random.Random], tuple[Any, ...]]] = {
    "data": _data,
    "rows": rows.rows,
    "target": _target,
    "template": templates.template,
    "draft eagle3": partial(_draft, "eagle3"),
    "draft dflash": partial(_draft, "dflash"),
    "features": _features,
    "yaml": _yaml,
    "words": _words,
    "servers": servers.draw_words,
    "numbers": numbers.absurd_number,
    "special files": special_files.special_file,
    "run directories": run_directories.run_directory,
    "outputs": outputs.output,
    "benchmarks": benches.bench,
    "quantized": _quantized,
    "images": images.image,
    "whole targets": whole_targets.whole_target,
    "combined": combined.combined,
}
