"""A draft that learnt an agent's calls guesses them; one that learnt the answers behind them alone does not."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from spec_trainer.cli import app as cli

from ..chat_templates import thinking_tokenizer

pytestmark = pytest.mark.slow
CITIES = ("Oslo", "Rome", "Lima", "Bonn", "Kiev", "Baku", "Doha", "Riga")
TARGET_STEPS = 200
WORDS = (
    "data.eval_samples=0", "train.schedule=constant", "train.lr=5e-3", "train.warmup_steps=5",
    "train.global_batch_tokens=512", "train.steps=80", "draft.num_steps=3", "draft.layers=[1,2,3]",
)  # fmt: skip


def conversation(city: str, degrees: int) -> list[dict]:
    """A question, the call that it needs, its result and the answer."""
    arguments = json.dumps({"zone": f"{city}/centre", "format": "degrees"})
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    return [
        {"role": "user", "content": f"{city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(degrees), "tool_call_id": "1"},
        {"role": "assistant", "content": f"People who live there say that it is {degrees} now."},
    ]


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    draw = random.Random(3)
    return [{"messages": conversation(draw.choice(CITIES), draw.randrange(10, 40))} for _ in range(160)]


@pytest.fixture(scope="module")
def target(place, rows) -> Path:
    """A target that has learnt the conversations of ``rows``."""
    torch.manual_seed(0)
    tokenizer = thinking_tokenizer()
    tokenizer.save_pretrained(place / "target")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **shape, vocab_size=320, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id
    )
    config.bos_token_id = None
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [_rendered(tokenizer, row) for row in rows]
    draw = random.Random(4)
    for _ in range(TARGET_STEPS):
        batch = tokenizer(draw.sample(texts, 8), return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(place / "target")
    return place / "target"


def _rendered(tokenizer: transformers.PreTrainedTokenizerFast, row: dict) -> str:
    tokenizer.pad_token = tokenizer.eos_token
    messages = json.loads(json.dumps(row["messages"]))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.fixture(scope="module")
def taught(place, target, rows) -> dict[str, Path]:
    """Drafts by what they have learnt of the same conversations: all, or the answers behind the calls alone."""
    data = {
        "all": write(place / "all.jsonl", rows),
        "answers": write(place / "answers.jsonl", [row | {"last_turn_only": True} for row in rows]),
    }
    for name, file in data.items():
        words = [f"target={target}", f"data.path={file}", f"output={place / name}", *WORDS]
        assert cli.run(["train", *words]) == 0
    return {name: place / name / "draft" for name in data}


@pytest.fixture(scope="module")
def prompts(place) -> dict[str, Path]:
    """Prompts by what is due: a call, or prose."""
    asked = [conversation(city, 12) for city in CITIES[:4]]
    return {
        "calls": write(place / "calls.jsonl", [{"messages": messages[:2]} for messages in asked]),
        "prose": write(place / "prose.jsonl", [{"messages": messages} for messages in asked]),
    }


@pytest.mark.timeout(900)
def test_a_draft_that_learnt_calls_guesses_them(target, taught, prompts, capsys) -> None:
    lengths = {
        (name, kind): _acceptance_length(target, draft, file, capsys)
        for name, draft in taught.items()
        for kind, file in prompts.items()
    }
    accepted = {name: lengths[name, "calls"] - 1 for name in taught}  # guesses of a round
    assert accepted["all"] > 2.5 * accepted["answers"]
    assert lengths["answers", "prose"] > 1.4 * lengths["answers", "calls"]
    assert lengths["all", "prose"] == pytest.approx(lengths["answers", "prose"], rel=0.25)


def _acceptance_length(target: Path, draft: Path, file: Path, capsys) -> float:
    capsys.readouterr()
    named = ["--target", str(target), "--draft-model", str(draft), "--prompts", str(file)]
    assert cli.run(["evaluate", *named, "--max-new-tokens", "48", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["acceptance_length"]
