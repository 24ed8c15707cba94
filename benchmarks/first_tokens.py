"""Train a fresh draft of a real target on its first tokens, for several initial scales; print one JSON document.

python benchmarks/first_tokens.py target chats.jsonl --draft eagle3 --logit-std inf 0.5 --option num_steps=3

A line of the data is ``{"messages": [question, answer]}``, or ``{"text": ...}``. The target's states are computed
once, in bfloat16. Each row of the table is a draft trained by AdamW on the CPU and evaluated on samples that it does
not see.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from measure import machine, versions
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_core import Draft, plugins
from spec_core.records import DraftBatch, Span, StepOutput, Supervision
from spec_kit.layers import TargetOps, initial_weights
from spec_kit.targets import read_target, read_target_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core import TargetSpec

HELD_OUT = 24
SHOWN = ("accuracy", "acceptance_length", "step_loss", "slot_loss", "head_loss", "guess_loss")


@dataclass(frozen=True)
class Sample:
    """A conversation, its supervised tokens, and the target's states [T, N, H]."""

    ids_T: Tensor
    mask_T: Tensor
    hidden_TNH: Tensor


def main(arguments: Sequence[str]) -> None:
    """Compute the target's states, then train a draft for every scale and seed."""
    options = _options(arguments)
    target = read_target(options.target)
    algorithm = plugins.load_available(Draft, options.draft)
    draft = algorithm(algorithm.Config(name=options.draft, **dict(options.option)))
    samples = captured(options, target, draft.required_features(target).layers)
    rows = [
        {"logit_std": scale, "seed": seed, "curve": trained(draft, target, samples, scale, seed, options)}
        for scale in options.logit_std
        for seed in options.seed
    ]
    document = {
        "date": str(dt.datetime.now(dt.UTC).date()),
        "machine": machine(),
        "versions": versions("torch", "transformers", "spec-core"),
        "command": " ".join(["benchmarks/first_tokens.py", *arguments]),
        "rows": rows,
    }
    print(json.dumps(document, indent=1))


@torch.no_grad()
def captured(options: argparse.Namespace, target: TargetSpec, layers: Sequence[int]) -> list[Sample]:
    """Return the samples of the data file, cut to ``--length`` tokens, with the captured ``layers``."""
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval().base_model
    states, samples = dict[int, torch.Tensor](), list[Sample]()
    for layer in layers:
        place = model.norm if layer == target.num_layers else model.layers[layer]
        place.register_forward_pre_hook(lambda _, args, layer=layer: states.update({layer: args[0]}))
    lines = options.data.read_text().splitlines()[: HELD_OUT + options.steps * options.samples]
    for line in lines:
        ids_T, mask_T = _tokens(json.loads(line), tokenizer, options.length)
        model(ids_T[None])
        samples.append(Sample(ids_T, mask_T, torch.stack([states[layer][0] for layer in layers], dim=1)))
    return samples


def _tokens(row: dict[str, Any], tokenizer: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and the mask of supervised tokens, which an answer's are."""
    prompt, answer = "", row.get("text")
    if answer is None:
        *before, last = row["messages"]
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        answer = last["content"]
    known, rest = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer))
    ids_T = torch.tensor([*known, *rest][:length])
    return ids_T, torch.arange(len(ids_T)) >= len(known)


def trained(
    draft: Draft,
    target: TargetSpec,
    samples: list[Sample],
    scale: float,
    seed: int,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return loss and metrics of held-out samples during one training run.

    ``scale``: initial standard deviation of logits; ``inf`` leaves the target's final norm as it is.
    """
    print(options.draft, scale, seed, file=sys.stderr)
    held_out, train = samples[:HELD_OUT], samples[HELD_OUT:]
    initial_weights.LOGIT_STD, initial_weights.LEAST_OWN_LOGIT = scale, 0.0
    tensors, counts = read_target_tensors(target), torch.zeros(target.vocab_size, dtype=torch.int64)
    for sample in train:
        counts += sample.ids_T[sample.mask_T].bincount(minlength=target.vocab_size)
    ops = TargetOps(target, tensors, torch.device("cpu"), torch.float32)
    torch.manual_seed(seed)
    module = draft.build(target, tensors, counts)
    optimizer = torch.optim.AdamW(module.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    random.Random(seed).shuffle(train)
    curve, tokens = list[dict[str, Any]](), 0
    for step in range(options.steps + 1):
        if step % options.every == 0 or step == options.steps:
            curve.append({"tokens": tokens, **_evaluated(draft, module, held_out, ops)})
        if step == options.steps:
            break
        first = step * options.samples
        batch = train[first : first + options.samples]
        _output(draft, module, batch, ops, first).loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()
        curve[-1].setdefault("grad_norm", norm)
        optimizer.param_groups[0]["lr"] = options.lr * min(1, (step + 1) / 10)
        optimizer.step()
        optimizer.zero_grad()
        tokens += sum(len(sample.ids_T) for sample in batch)
    return curve


@torch.no_grad()
def _evaluated(draft: Draft, module: nn.Module, samples: list[Sample], ops: TargetOps) -> dict[str, Any]:
    output = _output(draft, module, samples, ops, 10**6)
    return {"loss": output.loss.item(), **{k: v for k, v in output.metrics().items() if k in SHOWN}}


def _output(draft: Draft, module: nn.Module, samples: list[Sample], ops: TargetOps, first: int) -> StepOutput:
    """Return the module's output for a batch whose samples have the ids ``first``, ``first`` + 1 and so on."""
    spans, start = list[Span](), 0
    for index, sample in enumerate(samples, first):
        spans.append(Span(sample_id=index, epoch=0, start=start, stop=start + len(sample.ids_T)))
        start = spans[-1].stop
    batch = DraftBatch(
        input_ids_T=torch.cat([sample.ids_T for sample in samples]),
        hidden_TNH=torch.cat([sample.hidden_TNH for sample in samples]).float(),
        loss_mask_T=torch.cat([sample.mask_T for sample in samples]),
        spans=tuple(spans),
    )
    known = [
        Supervision(
            sample_id=span.sample_id, epoch=0, loss_mask=sample.mask_T, guess_depth=None, seed=batch.seed
        )
        for span, sample in zip(spans, samples, strict=True)
    ]
    return module(batch, draft.denominators(known), ops)


def _option(word: str) -> tuple[str, Any]:
    key, value = word.split("=", 1)
    return key, yaml.safe_load(value)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", type=Path)
    add("data", type=Path)
    add("--draft", default="eagle3")
    add("--option", type=_option, nargs="*", default=[], metavar="KEY=VALUE", help="options of section draft")
    add("--logit-std", type=float, nargs="+", default=[float("inf"), initial_weights.LOGIT_STD])
    add("--seed", type=int, nargs="+", default=[0])
    add("--lr", type=float, default=1e-3)
    add("--steps", type=int, default=120)
    add("--samples", type=int, default=2, help="samples of a step")
    add("--length", type=int, default=200, help="tokens of a sample at most")
    add("--every", type=int, default=40, help="steps between evaluations")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
