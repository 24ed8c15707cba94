"""Give two example command lines for the help of each command; a test parses each of them."""

from __future__ import annotations

_RUN = "--target path/to/target --data chats.jsonl"

EXAMPLES = {
    "train": (f"{_RUN} --output runs/mine", "--config run.yaml train.lr=1e-4 train.epochs=3"),
    "plan": (_RUN, f"{_RUN} --show 3"),
    "plugins": ("", "--json"),
    "check": ("", "--json"),
    "capture": (f"{_RUN} --output features", "--verify features"),
    "regenerate": (
        f"{_RUN} --output answers.jsonl",
        f"{_RUN} --output answers.jsonl --max-new-tokens 512",
    ),
    "export": (
        "--checkpoint runs/mine/checkpoints/best --output draft",
        "--checkpoint runs/mine/checkpoints/step-500 --output draft --target path/to/target",
    ),
    "convert": (
        "--draft-model downloaded --target path/to/target --output draft",
        "--draft-model downloaded --target owner/name --output draft",
    ),
    "evaluate": (
        "--target path/to/target --draft-model runs/mine/draft --prompts prompts.jsonl",
        "--server http://127.0.0.1:8000 --baseline-server http://127.0.0.1:8001 --bench gsm8k:100 --concurrency 1,8",
    ),
    "push": (
        "--target path/to/target --draft-model runs/mine/draft --to http://127.0.0.1:8000",
        "--target path/to/target --draft-model draft --to http://a:8000 --to http://b:8000 --json",
    ),
    "follow": (
        f"{_RUN} --server http://127.0.0.1:8000 --draft-model runs/mine/draft --output runs/follow",
        f"{_RUN} --server http://a:8000 --server http://b:8000 --output runs/follow --requests 10000",
    ),
    "serving": ("--of http://127.0.0.1:8000", "--of http://a:8000 --of http://b:8000 --json"),
    "quickstart": ("--target path/to/target --budget 20m", "--seed 1 --output runs/seed-1"),
}
"""Command -> arguments after ``spec-trainer COMMAND`` in its examples."""


def examples_text(command: str) -> str:
    """Return the examples section of a command's help."""
    lines = (f"  spec-trainer {command} {words}".rstrip() for words in EXAMPLES[command])
    return "\n\n".join(("Examples:", *lines))  # help joins lines, and keeps paragraphs
