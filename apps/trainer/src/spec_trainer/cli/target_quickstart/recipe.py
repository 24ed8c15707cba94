"""Choose the settings of a first draft by rules; docs/hyperparameters.md has their reasons and what was measured."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from spec_core import Backend, Draft, Engine, TargetSpec, foreign_errors
from spec_core.errors import PluginError
from spec_core.plugins import availability, load_each
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS, FIRST_DRAFT_WORDS

log = logging.getLogger(__name__)

RATES = ((128, 7e-3), (576, 2e-3), (4096, 4e-4))
"""(width of the target, learning rate): a wider draft needs a smaller one. Between them log(rate) is linear in
log(width)."""
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""Flags of CPUs that compute in bfloat16; others convert to float32 and back, which takes longer than float32."""
_LONG_CPU_S, _LONG_GPU_S = 600.0, 3600.0
"""Budgets from which the chain is unrolled further: each step of it costs about as much as the first."""
_FEWEST_BATCHES = 8
"""Least number of batches in a pass over the data: with fewer steps a draft hardly leaves its initial weights."""
ANSWER_TEMPERATURE = 0.0
"""Temperature of the answers: a first draft learns most from the words that a server gives most often."""
FEWEST_ANSWER_TOKENS = 24
"""Least length of an answer: shorter ones are hardly more than their first words."""
_ANSWERS_IN_TURN = 3
"""Answers that follow one another in a batch: those that are under way at the end of the time are dropped."""
_BATCH = 2.0
"""Time of a decoding step of a batch in units of a step of one answer; on a GPU it is less."""
_LARGE_PASS = 32768
"""Tokens of a forward pass of the target on an accelerator, padding included: most batches take one pass."""
_AT_ONCE = 8
"""Answers at once on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about the machine that the rules use."""

    backend: str
    is_cpu: bool
    has_bfloat16: bool
    """Whether the devices compute in bfloat16 faster than in float32."""


def look_at_machine(backend: str | None) -> Machine:
    """Return the machine with this backend, or with the first backend that has devices of its own here."""
    from spec_core.plugins import load_available

    name = backend or next(_with_own_devices(), DEFAULT_PLUGINS["backend"])
    plugin = load_available(Backend, name)
    is_cpu = plugin.device_type == Backend.device_type
    has_bfloat16 = "bfloat16" in plugin.capabilities().dtypes and (not is_cpu or _cpu_has_bfloat16())
    return Machine(backend=name, is_cpu=is_cpu, has_bfloat16=has_bfloat16)


def _with_own_devices() -> Iterator[str]:
    """Yield the backends that have devices of their own here; one that fails is passed over."""
    for name, plugin in load_each(Backend):
        if not isinstance(plugin, type) or plugin.device_type == Backend.device_type:
            continue
        try:
            with foreign_errors(PluginError, f"backend {name!r} is passed over"):
                has_devices = availability(Backend, name).ok and plugin.capabilities().num_devices > 0
        except PluginError as error:
            log.warning("%s", error)
            continue
        if has_devices:
            yield name


def _cpu_has_bfloat16() -> bool:
    file = Path("/proc/cpuinfo")
    return file.exists() and not _BFLOAT16_FLAGS.isdisjoint(file.read_text(errors="replace").split())


def peak_rate(width: int) -> float:
    """Return the peak learning rate for a draft of a target of this width (``RATES``)."""
    for (low, at_low), (high, at_high) in pairwise(RATES):
        if width <= high:
            share = math.log(max(width, low) / low) / math.log(high / low)
            return float(f"{at_low * (at_high / at_low) ** share:.2g}")
    return RATES[-1][1]


def vocabulary(vocab_size: int, is_cpu: bool) -> int | None:
    """Return the size of the draft's vocabulary; None: the target's. The head is most of a small draft's weights."""
    if is_cpu:
        return 8192 if vocab_size > 16384 else None
    return 32000 if vocab_size >= 100_000 else None


def chain_steps(budget_s: float, is_cpu: bool) -> int:
    """Return how many tokens ahead a chain is trained: few where a budget buys few steps."""
    if is_cpu:
        return 4 if budget_s > _LONG_CPU_S else 3
    return 7 if budget_s > _LONG_GPU_S else 5


def batch_tokens(num_tokens: int, budget_s: float, is_cpu: bool) -> int:
    """Return the number of tokens in an optimizer step, if a pass over the data has ``num_tokens``."""
    most = 3072 if is_cpu else 65536 if budget_s > _LONG_GPU_S else 16384
    return max(512, min(most, num_tokens // _FEWEST_BATCHES))


def draft_options(
    draft: type[Draft], target: TargetSpec, machine: Machine, budget_s: float
) -> dict[str, int]:
    """Return options of the draft: those that its kind has, and with which no engine refuses it."""
    wanted = {
        "vocab_size": vocabulary(target.vocab_size, machine.is_cpu),
        "num_steps": chain_steps(budget_s, machine.is_cpu),
    }
    fields = draft.Config.model_fields
    own = {key: value for key, value in wanted.items() if key in fields and value is not None}
    return {key: value for key, value in own.items() if _engines(draft, **{key: value}) == _engines(draft)}


def _engines(draft: type[Draft], **options: int) -> set[str]:
    return set(draft(draft.Config(name=draft.name, **options)).serving_methods)


def engine_words(engine: type[Engine], machine: Machine) -> list[str]:
    """Return the options that suit the machine, as far as the engine has them.

    On a CPU float32 is faster than a bfloat16 that is converted, and a step takes long with many answers at once. On
    other hardware an engine in the trainer's process takes few, large passes: Python launches the kernels of both.
    """
    if not machine.is_cpu:
        return [f"engine.batch_tokens={_LARGE_PASS}"] if engine.abilities.in_process else []
    wanted = {"max_num_seqs": _AT_ONCE, **({} if machine.has_bfloat16 else {"dtype": "float32"})}
    return [f"engine.{key}={value}" for key, value in wanted.items() if key in engine.Config.model_fields]


def training_words(target: TargetSpec, machine: Machine, num_tokens: int, budget_s: float) -> list[str]:
    """Return the settings of the training run, but for its number of steps."""
    return [
        f"train.lr={peak_rate(target.hidden_size)}",
        f"train.global_batch_tokens={batch_tokens(num_tokens, budget_s, machine.is_cpu)}",
        f"train.dtype={'bfloat16' if machine.has_bfloat16 else 'float32'}",
        "train.warmup_steps=10",
        *FIRST_DRAFT_WORDS,
    ]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The largest numbers of tokens of a prompt and of an answer."""

    prompt: int
    answer: int

    @property
    def both(self) -> int:
        """The largest number of tokens of a sample."""
        return self.prompt + self.answer


def lengths(target: TargetSpec, machine: Machine) -> Lengths:
    """Return the lengths of prompts and answers: short on a CPU, which is to answer many within minutes."""
    answer, prompt = (256, 256) if machine.is_cpu else (512, 1024)
    return Lengths(
        prompt=min(prompt, target.max_positions // 2), answer=min(answer, target.max_positions // 4)
    )


def most_prompts(budget_s: float, machine: Machine) -> int:
    """Return the largest number of prompts of a round, those that are held out included.

    On an H200 a target of 135 million parameters answered 9,600 of them within a fifth of the ten minutes.
    """
    return int(budget_s * (1 if machine.is_cpu else 16))


def prompts_held_out(budget_s: float, machine: Machine) -> int:
    """Return the number of prompts on which the draft is measured, one answer at a time among others."""
    seconds, most = (60, 32) if machine.is_cpu else (10, 96)
    return min(max(int(budget_s / seconds), 4), most)


def answer_tokens(seconds: float, token_s: float, num_prompts: int, most: int) -> int:
    """Return the largest number of tokens of an answer, so that some answers follow one another in ``seconds``.

    ``token_s``: seconds of a token if one answer is decoded at a time. A cut answer teaches as much as a whole one.
    """
    in_turn = min(_ANSWERS_IN_TURN, math.ceil(num_prompts / _AT_ONCE))
    fitting = int(seconds / (max(1, in_turn) * _BATCH * token_s))
    return min(most, max(FEWEST_ANSWER_TOKENS, fitting))
