"""Tiny tokenizers, made on the spot, and ways to look at what is supervised."""

import json
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spec_kit.targets import read_target
from spec_testing import processes
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data import row_encoder
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.row_images import ImageRules

from ....chat_templates import CHATML, stretches
from ....seeing_targets import VOCABULARY
from .image_rows import encoded, pixels

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>",
    "<|user|>", "<|assistant|>", "<s>", "</s>", "<turn|>",
]  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is two and two? Four, I think.",
    "user assistant",
]
VOCAB = 400
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The fox"}]}
SHARED = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "The fox"}]}
TOKENS = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=VOCAB - 20, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Tokens that carry the space before a word, as SentencePiece models have."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = [chr(code) for code in range(33, 127)]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=200, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
        ),
    )
    return tokenizer


def read(path, folder="nowhere", **settings):
    """Return the dataset of a path; ``settings`` are keys of section data."""
    return load_dataset(DataConfig(path=str(path), **({"eval_samples": 0} | settings)), folder, VOCAB)


def numbers(count, start=0):
    """Return rows of four tokens, all different."""
    return [{"input_ids": [10, 20, start + i, i % 7], "loss_mask": [0, 1, 1, i % 2]} for i in range(count)]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """(template, kind of tokenizer) -> folder of a tokenizer with that chat template."""

    def make(template: str | None = CHATML, build=byte_level) -> Path:
        tokenizer = build()
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|endoftext|>", chat_template=template
        )
        folder = tmp_path / "target"
        fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def write(tmp_path):
    """Writes rows as a JSONL file and gives its path."""

    def make(*rows: object, name: str = "rows.jsonl") -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8"
        )
        return str(file)

    return make


@pytest.fixture
def load(tokenizer_folder, write):
    """Rows to a dataset in one call; keywords are keys of section data, `template` and `build` excepted."""

    def make(*rows: object, template: str | None = CHATML, build=byte_level, **settings):
        config = DataConfig(path=write(*rows), **({"eval_samples": 0} | settings))
        return load_dataset(config, tokenizer_folder(template, build), VOCAB)

    return make


@pytest.fixture
def supervised(tmp_path):
    """The supervised tokens of samples as text, with '|' between stretches and '||' between samples."""

    def make(*samples) -> str:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target", local_files_only=True)
        learnt = [stretches(sample.input_ids, sample.loss_mask) for sample in samples]
        return " || ".join(" | ".join(map(tokenizer.decode, one)) for one in learnt)

    return make


@pytest.fixture
def decoded(tmp_path):
    """All tokens of a sample as text."""

    def make(sample) -> str:
        return AutoTokenizer.from_pretrained(tmp_path / "target", local_files_only=True).decode(
            sample.input_ids
        )

    return make


@pytest.fixture
def tokenizer_kinds():
    return SimpleNamespace(byte_level=byte_level, metaspace=metaspace)


@pytest.fixture(scope="session")
def fork_server():
    """A context of which the server has imported what renders rows.

    A server that runs already, for earlier tests, lacks it: each process would import it.
    """
    server = multiprocessing.get_context("forkserver")
    transformers = [f"transformers.models.auto.{part}_auto" for part in ("tokenization", "image_processing")]
    forkserver._forkserver._stop()
    server.set_forkserver_preload([*transformers, row_encoder.__name__, *processes.PRELOADED])
    return server


@pytest.fixture
def by_processes(monkeypatch, fork_server):
    """Have all rows but the first rendered by two processes, forked from a server that has only imported."""
    monkeypatch.setattr(row_encoder, "ALONE_S", -1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork_server)


@pytest.fixture
def media(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded())
    (folder / "b.jpg").write_bytes(encoded(pixels(33, 47), "JPEG"))
    return folder


@pytest.fixture
def load_seeing(seeing_target, write, media):
    """Rows to a dataset of a target that sees."""

    def load(*rows, model_type="qwen2_5_vl", refused="", **settings):
        path = settings.pop("path", None) or write(*rows)
        config = DataConfig(path=path, **({"eval_samples": 0, "media_root": str(media)} | settings))
        rules = ImageRules.of(read_target(seeing_target(model_type)), refused)
        return load_dataset(config, seeing_target(model_type), VOCABULARY, images=rules)

    return load
