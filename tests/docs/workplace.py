"""The commands of pages, and a folder in which their placeholders exist: a target, chats, prompts, run.yaml."""

import json
import re
import shlex
from pathlib import Path

from spec_trainer.cli.quickstart.corpus import Document
from spec_trainer.cli.quickstart.tiny_target import TinyTargetConfig, build_tiny_target, continuation_chat

TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(40))


TOY = TinyTargetConfig(
    vocab_size=300,
    num_layers=8,
    hidden_size=32,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=32,
    batch_size=2,
    steps=2,
)
_FIRST = re.compile(r"(?:\.venv/bin/)?(?:spec-trainer|make|python|pip|vllm)\b")


def commands(page: Path) -> list[list[str]]:
    """Words of every command in shell blocks and indented lines."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if re.match(r"    \S", line)]
    return [shlex.split(line, comments=True) for line in lines if _FIRST.match(line)]


def make_workplace(folder: Path) -> None:
    """Fill ``folder``."""
    (folder / "path/to").mkdir(parents=True)
    build_tiny_target(folder / "path/to/target", [Document("a.py", TEXT)], TOY)
    chats = [{"messages": continuation_chat(TEXT[start : start + 300])} for start in range(0, 600, 30)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "prompts.jsonl").write_text(json.dumps({"messages": chats[0]["messages"][:1]}) + "\n")
    (folder / "run.yaml").write_text(
        "target: path/to/target\ndata: {path: chats.jsonl}\ndraft: {num_steps: 2}\n"
        "train: {steps: 2, global_batch_tokens: 512}\n"
    )
