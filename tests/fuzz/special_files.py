"""Special files under any name that a command opens: pipes, devices, vast files, loops of links, folders."""

import os
import random
from pathlib import Path

from . import material

_ENDS = [".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".jsonl", ".parquet", ".jsonl.gz"]
_KNOWN = [
    "added_tokens.json", "special_tokens_map.json", "generation_config.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "additional_chat_templates/x.jinja",
    "model.safetensors.index.json", "model.safetensors", "processor_config.json", "pytorch_model.bin", "chat.json",
    "tokenizer.json", "tokenizer_config.json", "config.json", "dataset_info.json",
]  # fmt: skip


def special_file(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """A file of a target, a draft, features or data is a special one, or a further one is."""
    kind = draw.choice(["target", "target", "draft", "features", "data", "config", "template", "hub"])
    target, draft, data, features, more = root / "target", None, root / "rows.jsonl", None, []
    if kind == "target":
        target = material.copy(root, "target", folder)
        what = put(_place(target, draw), draw)
    elif kind == "draft":
        draft = material.copy(root, "eagle3", folder)
        what = put(_place(draft, draw), draw)
    elif kind == "features":
        features, data = material.copy(root, "features", folder), root / "tokens.jsonl"
        what = put(_place(features, draw), draw)
    elif kind == "data":
        data = folder / "data"
        data.mkdir()
        material.copy(root, "tokens.jsonl", data)
        what = put(_place(data, draw), draw)
    elif kind == "hub":
        return _hub(root, folder, draw)
    else:
        what = put(folder / "given", draw)
        more = (
            ["--config", folder / "given"] if kind == "config" else [f"data.chat_template={folder / 'given'}"]
        )
    words = ["--target", target, "--data", data, "--output", folder / "out"]
    if draft is not None and draw.random() < 0.5:
        prompts = ["--target", target, "--draft-model", draft, "--prompts", root / "tokens.jsonl"]
        return what, ["evaluate", *prompts, "--max-new-tokens", 1, "--temperature", 0, "--no-untrained"]
    if draft is not None:
        more = [f"draft.init_from={draft}"]
    if features is not None:
        more = ["data.eval_samples=2", f"data.features={features}"]
    return what, ["plan", *words, *more]


def put(file: Path, draw: random.Random) -> str:
    """Put something special there, in place of what is there."""
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        file.unlink()
    how = draw.choice(
        ["pipe", "zero", "urandom", "null", "vast", "vast link", "loop", "folder", "socket", "tty"]
    )
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "socket":
        os.mknod(file, 0o140666)
    elif how == "tty":
        file.symlink_to("/dev/stdin")
    elif how.startswith("vast"):
        real = file if how == "vast" else file.parent.parent / "vast"
        with real.open("wb") as stream:
            stream.truncate(1 << 40)
        if how == "vast link":
            file.symlink_to(real)
    else:
        file.symlink_to(f"/dev/{how}")
    return f"{file.parent.name}/{file.name}: {how}"


def _place(folder: Path, draw: random.Random) -> Path:
    """A file that is there, one of a name that programs look for, or one whose name only ends as such do."""
    there = sorted(path for path in folder.iterdir() if path.is_file())
    further = folder / f"{draw.choice(['x', 'sub/x'])}{draw.choice(_ENDS)}"
    return draw.choice([draw.choice(there), folder / draw.choice(_KNOWN), further])


def _hub(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """A cache of the hub for ``evaluate --bench``, one of whose files is special."""
    cache = folder / "hub" / "datasets--openai--gsm8k"
    snapshot = cache / "snapshots" / ("a" * 40) / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "test.jsonl").write_text('{"question": "How many?", "answer": "2"}\n' * 3)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    what = put(draw.choice([cache / "refs" / "main", snapshot / "test.jsonl", snapshot / "more.jsonl"]), draw)
    words = ["--target", root / "target", "--draft-model", root / "eagle3", "--bench", "gsm8k:2"]
    rest = ["--bench-data", folder / "hub", "--max-new-tokens", 1, "--temperature", 0, "--no-untrained"]
    return f"hub: {what}", ["evaluate", *words, *rest]
