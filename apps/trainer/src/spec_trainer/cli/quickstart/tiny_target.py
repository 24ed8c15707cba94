"""Train the quickstart's target, a language model of three million parameters, in a minute or two.

It is saved as an ordinary Hugging Face folder (Qwen3, byte-level BPE, chat template), so that every engine loads it
like any other target. Half of the documents are trained on as plain text. The other half are chats in which the
assistant continues the user's text (``continuation_chat``), so that prompts of both forms are in distribution.

Shapes: B batch, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from spec_core import Optimizer, TrainedWeight, map_here, plugins
from spec_trainer.base.disk import scratch_beside
from spec_trainer.cli.quickstart.corpus import Document
from spec_trainer.cli.quickstart.tiny_arithmetic import bfloat16_products

Progress = Callable[[int, int, torch.Tensor], None]
"""Called with the step (from 1), the number of steps, and the loss in nats per token, a tensor on the device."""

CPU = torch.device("cpu")
OPTIMIZER = "muon"
"""Plugin that trains the matrices of target and draft."""
END_OF_TEXT, PAD, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"

# The assistant's tokens, its end of turn among them, are what a draft learns from.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class TinyTargetConfig:
    """Sizes of the tiny target and its training (docs/decisions/007-quickstart-target.md)."""

    vocab_size: int = 768
    num_layers: int = 16
    hidden_size: int = 128
    head_dim: int = 32
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 256
    seq_len: int = 256
    max_position_embeddings: int = 2048
    batch_size: int = 8
    steps: int = 320
    shallow_steps: float = 0.6  # share of the steps that train every second layer alone
    warmup_steps: int = 20
    lr: float = 8e-3  # of AdamW, for embeddings and norms
    matrix_lr: float = 2e-2  # of Muon, for the layers' matrices
    weight_decay: float = 0.1
    seed: int = 0


def build_tiny_target(
    folder: Path,
    documents: Iterable[Document],
    config: TinyTargetConfig,
    device: torch.device = CPU,
    progress: Progress | None = None,
) -> None:
    """Train a target on ``documents`` and save it to ``folder`` atomically.

    The same documents, configuration, library versions, number of threads and type of device give the same weights.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    texts = [document.text for document in documents]
    random.Random(config.seed).shuffle(texts)
    tokenizer = train_tokenizer(texts, config.vocab_size)
    windows_NT = _pack(texts, tokenizer, config.seq_len).to(device)
    if len(windows_NT) < config.batch_size:
        raise ValueError(
            f"{len(texts)} documents fill {len(windows_NT)} windows of {config.seq_len} tokens; "
            f"a batch needs {config.batch_size}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        batches = _batches(windows_NT, config.batch_size)
        model = _new_model(replace(config, num_layers=config.num_layers // 2), tokenizer).to(device)
        growth = round(config.shallow_steps * config.steps)
        # On a CPU, the backward pass of fused attention takes twice as long as plain products for heads this small.
        attention = sdpa_kernel(SDPBackend.MATH) if windows_NT.is_cpu else nullcontext()
        with bfloat16_products(), attention:
            _train(model, batches, range(growth), config, progress)
            model = _grown(model, _new_model(config, tokenizer).to(device))
            _train(model, batches, range(growth, config.steps), config, progress)
    _save(folder, model, tokenizer)


def tiny_target_cache_key(documents: Iterable[Document], config: TinyTargetConfig) -> str:
    """Return a cache key of the target that ``build_tiny_target`` would save.

    The number of threads and the device are not included, although they affect the rounding of the weights.
    """
    versions = {library.__name__: library.__version__ for library in (torch, transformers, tokenizers)}
    recipe = {
        "config": asdict(config),
        "optimizer": OPTIMIZER,
        "python": platform.python_version(),
        **versions,
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for document in documents:
        digest.update(hashlib.sha256(f"{document.source}\0{document.text}".encode()).digest())
    return digest.hexdigest()[:16]


def continuation_chat(text: str) -> list[dict[str, str]]:
    """Return a chat in which the user gives a text's first lines and the assistant the rest."""
    lines = text.splitlines(keepends=True)
    cut = min(12, max(1, len(lines) // 3))
    opening = "".join(lines[:cut])
    rest = "".join(lines[cut:])
    return [{"role": "user", "content": opening}, {"role": "assistant", "content": rest}]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on ``texts``."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START_OF_TURN, END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _pack(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, seq_len: int) -> torch.Tensor:
    """Return token windows [N, ``seq_len``] of the texts; every second text is rendered as a chat."""
    rendered = [
        tokenizer.apply_chat_template(continuation_chat(text), tokenize=False)
        if i % 2
        else text + END_OF_TEXT
        for i, text in enumerate(texts)
    ]
    encodings = tokenizer.backend_tokenizer.encode_batch(rendered, add_special_tokens=False)
    stream = torch.tensor([token for encoding in encodings for token in encoding.ids], dtype=torch.long)
    return stream[: len(stream) // seq_len * seq_len].view(-1, seq_len)


def _new_model(config: TinyTargetConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a new model with ``torch.nn.RMSNorm`` layers, which give equal results with fewer GPU kernels."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            initializer_range=0.06,  # near 1 / sqrt(hidden_size); the usual 0.02 starts slowly at this width
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, Qwen3RMSNorm):
                setattr(parent, name, torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon))
    return model


def _grown(shallow: Qwen3ForCausalLM, deep: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Return the model ``deep`` with the layers of ``shallow``, each followed by a copy of itself.

    The two output matrices of a copy start at 0, so that the copy adds nothing at first and the loss does not
    jump. The additional layers cost time only in the later steps.
    """
    weights = {name: weight for name, weight in shallow.state_dict().items() if ".layers." not in name}
    for index, layer in enumerate(shallow.model.layers):
        for name, weight in layer.state_dict().items():
            is_output = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            weights[f"model.layers.{2 * index}.{name}"] = weight
            weights[f"model.layers.{2 * index + 1}.{name}"] = 0 * weight if is_output else weight
    deep.load_state_dict(weights)
    return deep


def _train(
    model: Qwen3ForCausalLM,
    batches: Iterator[torch.Tensor],
    steps: range,
    config: TinyTargetConfig,
    progress: Progress | None,
) -> None:
    """Train the model for the optimizer steps in the range ``steps``, with their learning rates."""
    optimizers = _optimizers(model, config)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(steps.start + step, config))
        for optimizer in optimizers
    ]
    model.train()
    for step in steps:
        batch_BT = next(batches)
        logits_BTV = model(input_ids=batch_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), batch_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in (*optimizers, *schedulers):
            stepper.step()
        model.zero_grad()
        if progress:
            progress(step + 1, config.steps, loss.detach())


def _batches(windows_NT: torch.Tensor, batch_size: int) -> Iterator[torch.Tensor]:
    while True:
        for rows in torch.randperm(len(windows_NT)).split(batch_size):
            if len(rows) == batch_size:
                yield windows_NT[rows.to(windows_NT.device)]


def _lr_factor(step: int, config: TinyTargetConfig) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay to 2 %."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / config.steps)
    return min(1.0, (step + 1) / config.warmup_steps) * (0.02 + 0.98 * cosine)


def _optimizers(model: Qwen3ForCausalLM, config: TinyTargetConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for all other weights."""
    matrices = {name: weight for name, weight in model.model.layers.named_parameters() if weight.ndim == 2}
    others = [weight for weight in model.parameters() if all(weight is not one for one in matrices.values())]
    plugin = plugins.load(Optimizer, OPTIMIZER)
    options = {"name": OPTIMIZER, "matrix_scale": "original", "weight_decay": config.weight_decay}
    trained = [
        TrainedWeight(name=name, shape=tuple(weight.shape), values=weight)
        for name, weight in matrices.items()
    ]
    muon = plugin(plugin.Config.model_validate(options)).build(trained, map_here)
    for group in muon.param_groups:
        group["lr"] = config.matrix_lr
    return [muon, torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)]


def _save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save model and tokenizer to a temporary folder, and rename it to ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_beside(folder) as partial:
        try:
            model.eval().save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            partial.rename(folder)
        except OSError:
            # Another process may have come first, with the same target.
            if not (folder / "config.json").is_file():
                raise
