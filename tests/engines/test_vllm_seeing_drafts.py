"""vLLM's server drafts for targets that see: the text without the draft, and the guesses of our proposer."""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from spec_core.records import CaptureRequest, ImageSource
from spec_engine_vllm.serving import VllmServing
from spec_kit.drafting.draft_folder import recognise
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.app import run

from ..free_port import free_port
from ..image_requests import picture, question, reference_states
from ..made_once import made_once
from ..seeing_targets import GEMMA, IMAGE_ID, save_seeing_target
from .conftest import MAX_LENGTH, NUM_DRAFT_TOKENS
from .page_server import ServerProcess
from .replay import Replay
from .trained_drafts import write_answers
from .vllm_here import needs_vllm

if TYPE_CHECKING:
    from PIL import Image

    Pictures = list[tuple[ImageSource, Image.Image]]

pytestmark = [
    *needs_vllm,
    pytest.mark.xdist_group("seeing drafts"),
    pytest.mark.timeout(1200),
    pytest.mark.slow,  # two servers, started as a user's are; CI has SGLang's, and vLLM's states of images
]
START_S = 400.0
NEW_TOKENS = 48
PROMPTS = 40
SIZES = ((24, 24), (33, 47), (8, 90), (8, 8))
DRAFTS = {
    "eagle3": ["draft.num_steps=3", "draft.intermediate_size=256", "train.lr=8e-3"],
    "dflash": [
        "draft.block_size=4",
        "draft.anchor_share=1.0",
        "draft.num_layers=1",
        "draft.num_features=3",
        "train.lr=3e-3",
    ],
}


@dataclass(frozen=True)
class Served:
    draft_name: str
    target: Path
    folder: Path
    drafting: ServerProcess


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_vl", "eagle3"),
        ("qwen3_vl", "dflash"),
        ("qwen2_5_vl", "eagle3"),
        ("qwen3_5", "eagle3"),
        ("qwen3_5", "dflash"),
        ("qwen3_vl_moe", "eagle3"),
        ("qwen3_5_moe", "eagle3"),
        (GEMMA, "eagle3"),
        (GEMMA, "dflash"),
    ],
    ids="-".join,
)
def served(request, vllm_environment, tmp_path_factory) -> Iterator[Served]:
    """A server that the printed command starts."""
    kind, draft_name = request.param
    target = made_once(tmp_path_factory, f"seeing-{kind}-quiet", lambda to: save_quiet(to, kind))
    folder = tmp_path_factory.mktemp("served")
    rows, draw = folder / "rows.jsonl", random.Random(0)
    write_answers(target, [[draw.randrange(256) for _ in range(4)] for _ in range(24)], rows)
    with rows.open("a") as file:
        for seed in range(8):
            content = question(f"What is {seed}?", [picture(SIZES[seed % 4], seed)])
            answer = {"role": "assistant", "content": f"A picture, number {seed}."}
            file.write(json.dumps({"messages": [content, answer]}) + "\n")
    words = ["--target", target, "--data", rows, "--draft", draft_name, "--output", folder / "run"]
    settings = ["train.steps=80", "train.warmup_steps=5", "train.global_batch_tokens=1024"]
    assert run([str(word) for word in [*words, *DRAFTS[draft_name], *settings]]) == 0
    server = started(target, folder, folder / "run" / "draft")
    try:
        server.wait_ready(START_S)
        yield Served(draft_name, target, folder / "run" / "draft", server)
    finally:
        server.close()


def save_quiet(folder: Path, kind: str) -> None:
    """Save a target that does not answer with an image's token; Transformers would look for the image."""
    save_seeing_target(folder, kind, 64, 32)
    tensors = load_file(folder / "model.safetensors")
    head = "language_model.embed_tokens.weight" if kind == GEMMA else "lm_head.weight"
    (name,) = [name for name in tensors if name.endswith(head)]
    tensors[name][IMAGE_ID:] *= 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def plain(served, tmp_path_factory) -> Iterator[ServerProcess]:
    server = started(served.target, tmp_path_factory.mktemp("plain"))
    try:
        server.wait_ready(START_S)
        yield server
    finally:
        server.close()


def started(target: Path, folder: Path, draft: Path | None = None) -> ServerProcess:
    port = free_port()
    command = f"{sys.executable} -m vllm.entrypoints.openai.api_server --enforce-eager --model {target}"
    if draft is not None:
        spec = read_target(target)
        command = VllmServing().command(spec, recognise(draft, spec), draft, NUM_DRAFT_TOKENS)
    longest = 2 * MAX_LENGTH  # an image of Gemma 4 takes up to 70 tokens
    flags = f"--dtype float32 --max-model-len {longest} --kv-cache-memory-bytes 64M --port {port}"
    if "qwen3_5" in target.name:  # with prefix caching, vLLM looks for the recurrent layers that it lacks
        flags += " --no-enable-prefix-caching"
    return ServerProcess(f"{command} {flags}", folder, port)


def test_the_text_with_the_draft_is_the_text_without(served, plain) -> None:
    for number in range(PROMPTS):
        sizes = [SIZES[(number + index) % len(SIZES)] for index in range(number % 4)]
        pictures = [picture(size, number) for size in sizes]
        text = f"What is shown in {number}?"
        message = question(text, pictures)
        drafted = served.drafting.answer(served.target, message, NEW_TOKENS)
        assert drafted == plain.answer(served.target, message, NEW_TOKENS), number
    metrics = served.drafting.ask("GET", "/metrics")[2].decode()
    accepted = VllmServing().counters(metrics).acceptance.accepted
    print(f"{served.draft_name}: {accepted} guesses accepted")
    assert accepted > 0


@pytest.mark.parametrize(
    ("sizes", "second_runner"),
    [((), False), (((8, 8), (8, 8)), False), (((24, 24), (33, 47)), True)],
    ids=["text", "a token each, first runner", "many tokens each, positions of the second runner"],
)
def test_vllm_drafts_the_tokens_that_our_own_forward_pass_drafts(
    served, draft_notes, sizes, second_runner
) -> None:
    """Both runners of vLLM agree where an image takes one token: its coordinates are then the token's index."""
    pictures = [picture(size, 5) for size in sizes]
    switch = draft_notes.with_suffix(".positions")
    draft_notes.touch()
    already = len(draft_notes.read_text().splitlines())
    if second_runner:
        switch.touch()
    try:
        prompt, tokens = served.drafting.answer(served.target, question("What is it?", pictures), NEW_TOKENS)
    finally:
        switch.unlink(missing_ok=True)
    noted = [json.loads(line) for line in draft_notes.read_text().splitlines()[already:]]
    guesses = [tuple(drafts) for step in noted for drafts in step.values()]
    request = CaptureRequest(request_id=0, input_ids=(*prompt, *tokens), destinations=())
    hidden_TNH = reference_states(served.target, request, pictures)
    steps = Replay(served.target, served.folder, len(prompt), request.input_ids, hidden_TNH).steps(guesses)
    assert len(steps) >= 10
    assert [step.theirs for step in steps] == [step.ours for step in steps]
