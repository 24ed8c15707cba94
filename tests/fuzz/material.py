"""Sound files for cases to damage: a tiny target with its tokenizer, data, drafts, features and a configuration."""

import json
import random
import shutil
from pathlib import Path

VOCAB = 300
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


def build(root: Path) -> None:
    """Writes ``target``, ``rows.jsonl`` (conversations), ``rows.json``, ``rows.parquet``, ``tokens.jsonl``,
    ``eagle3``, ``dflash``, ``features``, ``run.yaml``, the run directories ``run`` and ``cycles``, and what
    ``images`` and ``whole_targets`` need."""
    from . import images, whole_targets

    _target(root / "target")
    _data(root)
    _drafts(root)
    _features(root)
    _runs(root)
    images.build(root)
    whole_targets.build(root)
    (root / "run.yaml").write_text(
        f"target: {root}/target\ndata:\n  path: {root}/tokens.jsonl\n  eval_samples: 2\noutput: out\n"
        "draft: {name: eagle3, num_steps: 2}\noptimizer: {betas: [0.9, 0.95]}\n"
        "train:\n  lr: 1e-3\n  steps: 4\nseed: 3\n"
    )


def copy(root: Path, name: str, scratch: Path) -> Path:
    """A copy of one of them that a case may damage."""
    source, there = root / name, scratch / name
    shutil.copytree(source, there) if source.is_dir() else shutil.copy(source, there)
    return there


def _target(folder: Path) -> None:
    from ..chat_templates import CHATML, byte_tokenizer
    from ..random_targets import save_random_target

    save_random_target(folder, "llama", 60_000, vocab_size=VOCAB)
    byte_tokenizer(("<|im_start|>", "<|im_end|>"), CHATML, None).save_pretrained(folder)


def _data(root: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    draw = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": role, "content": " ".join(draw.choices(WORDS, k=3))}
                for role in ("user", "assistant") * 2
            ]
        }
        for _ in range(8)
    ]
    tokens = [
        {"input_ids": [draw.randrange(3, VOCAB) for _ in range(12)], "loss_mask": [0] * 4 + [1] * 8}
        for _ in range(12)
    ]
    for name, rows in (("rows.jsonl", chats), ("tokens.jsonl", tokens)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rows.json").write_text(json.dumps(chats, indent=1))
    parquet.write_table(pa.Table.from_pylist(tokens), root / "rows.parquet")


def _drafts(root: Path) -> None:
    from spec_core import Draft, plugins
    from spec_kit.targets.target_reader import read_target
    from spec_trainer.cli.commands.evaluate import export_untrained

    target = read_target(root / "target")
    options = {"eagle3": {}, "dflash": {"num_layers": 1, "block_size": 4}}
    for name, given in options.items():
        plugin = plugins.load(Draft, name)
        draft = plugin(plugin.Config(name=name, **given))
        draft.check_target(target)
        export_untrained(draft, target, root / name)


def _features(root: Path) -> None:
    from spec_trainer.cli.app import run

    words = ["--target", root / "target", "--data", root / "tokens.jsonl", "--output", root / "features"]
    assert run(["capture", *map(str, words), "capture.shard_bytes=20000", "data.eval_samples=2"]) == 0


def run_words(root: Path, kind: str, output: Path) -> list[object]:
    """Return the command line of a run, of which ``output`` is the directory."""
    data = root / "tokens.jsonl"
    cycles = ["decode.every=2", "decode.prompts=2", "decode.max_new_tokens=4", "train.push_every=2"]
    words = [
        "--target", root / "target", "--data", data, "--output", output, "data.eval_samples=2",
        "train.steps=4",
    ]  # fmt: skip
    return [*words, "train.save_every=2", "train.eval_every=2", *(cycles if kind == "cycles" else [])]


def _runs(root: Path) -> None:
    from spec_trainer.cli.app import run

    for kind in ("run", "cycles"):
        assert run([str(word) for word in run_words(root, kind, root / kind)]) == 0
    folder = root / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[2] |= {"push_version": 2, "push_committed": True, "push_s": 0.5, "push_wait_s": 0.1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"time": 0.0, "step": 1, "worker": "engine-0", "cause": "it was killed"}
    (folder / "logs" / "replacements.jsonl").write_text(json.dumps(entry) + "\n")
    for kind in ("run", "cycles"):  # the page of what is there now
        assert run([str(word) for word in run_words(root, kind, root / kind)]) == 0
