from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from spec_trainer.cli.quickstart import tiny_target
from spec_trainer.cli.quickstart.corpus import Document
from spec_trainer.cli.quickstart.tiny_target import (
    TinyTargetConfig,
    build_tiny_target,
    continuation_chat,
    tiny_target_cache_key,
)

DOCUMENTS = [
    Document(
        f"file{i}.py", f"def add_{i}(a, b):\n    '''Add {i} to both.'''\n    c = a + b\n    return c + {i}\n"
    )
    for i in range(60)
]
TINY = TinyTargetConfig(
    vocab_size=300, num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64,
    seq_len=32, batch_size=4, steps=30, warmup_steps=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int, float]]]:
    folder, reports = tmp_path_factory.mktemp("targets") / "cache" / "tiny", []
    build_tiny_target(folder, DOCUMENTS, TINY, progress=lambda *report: reports.append(report))
    return folder, reports


def test_the_target_learns(built) -> None:
    _, reports = built

    assert [report[:2] for report in reports] == [(step, 30) for step in range(1, 31)]
    assert reports[-1][2] < 0.5 * reports[0][2]


def test_the_folder_is_an_ordinary_hugging_face_model(built) -> None:
    folder, _ = built
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    ids = tokenizer(DOCUMENTS[0].text, return_tensors="pt")["input_ids"]
    assert model(input_ids=ids, labels=ids).loss < 4
    assert tokenizer.decode(ids[0]) == DOCUMENTS[0].text
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size == 300
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_the_chat_template_marks_what_the_assistant_says_and_its_end(built) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(built[0])
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add?"},
        {"role": "assistant", "content": "a + b"},
    ]

    rendered = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    spoken = [i for i, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(spoken) == "a + b<|im_end|>"

    prompt = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert whole == prompt + "a + b<|im_end|>\n"


def test_a_seed_gives_the_same_weights_and_leaves_the_global_generator_alone(built, tmp_path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    build_tiny_target(tmp_path / "again", DOCUMENTS, TINY)

    assert torch.equal(torch.rand(1), expected)
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (built[0] / "model.safetensors").read_bytes()


def test_a_failed_build_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tiny_target.PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        build_tiny_target(tmp_path / "target", DOCUMENTS, replace(TINY, steps=1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_touched(tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("final")

    with pytest.raises(FileExistsError, match="is not empty"):
        build_tiny_target(tmp_path, DOCUMENTS, TINY)


def test_too_little_text_is_an_error_that_says_so(tmp_path) -> None:
    with pytest.raises(ValueError, match="a batch needs 4"):
        build_tiny_target(tmp_path / "target", DOCUMENTS[:1], TINY)


def test_the_cache_key_changes_with_the_corpus_and_the_configuration() -> None:
    keys = [
        tiny_target_cache_key(DOCUMENTS, TINY),
        tiny_target_cache_key(DOCUMENTS[:-1], TINY),
        tiny_target_cache_key(DOCUMENTS, replace(TINY, seed=1)),
    ]

    assert len(set(keys)) == 3
    assert keys[0] == tiny_target_cache_key(list(DOCUMENTS), replace(TINY))


def test_a_continuation_chat_says_the_whole_text() -> None:
    text = "one\ntwo\nthree\nfour\nfive\nsix"

    user, assistant = continuation_chat(text)
    assert (user["content"], assistant["content"]) == ("one\ntwo\n", "three\nfour\nfive\nsix")
