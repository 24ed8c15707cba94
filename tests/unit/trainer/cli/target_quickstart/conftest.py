"""A tiny target that answers, prompts for it, and requests of a quickstart."""

import json

import pytest

from spec_trainer.cli.target_quickstart.request import TargetQuickstart

from .....byte_chats import byte_chat_target

SECONDS = 6.0
"""The budget of a round: each stage ends in time, or at its least size."""


@pytest.fixture(scope="module")
def target(make_target):
    return byte_chat_target(make_target)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {number}?"}]} for number in range(400)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def request_of(target, tmp_path):
    def build(**options):
        given = {
            "draft": "eagle3",
            "engine": "hf",
            "backend": "cpu",
            "output": tmp_path / "out",
            "budget_s": SECONDS,
        }
        return TargetQuickstart(**{"target": str(target), **given, **options})

    return build
