"""Run one row of ``trainer_step``: build target, draft and batch in this process, and step.

Shapes: T tokens of all sequences end to end (packed), N captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dense_eagle3 import DenseEagle3
from kernel_table import host_waits, kernel_table
from measure import device_name, forget_peak, memory_mib, timed
from necessary_flops import NECESSARY_FLOPS, bare_tflops
from torch.distributed.fsdp import fully_shard  # noqa: F401 (here, so that the memory of imports holds it)

from spec_core import (
    Backend,
    Draft,
    Optimizer,
    StepConfig,
    Strategy,
    TargetSpec,
    TargetTensors,
    no_kernel,
    plugins,
)
from spec_core.records import DraftBatch, Span, Supervision
from spec_kit.layers import Fp8Layers, use_fp8_head
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from trainer_step import Case

    from spec_core import FindKernel
    from spec_core.records import FeatureSchema

    Step = Callable[[], float]

LR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs that both implementations start from."""

    case: Case
    draft: Draft
    target: TargetSpec
    tensors: TargetTensors
    token_counts: Tensor
    batch: DraftBatch
    denominators: Tensor

    def build(self, kernel: FindKernel) -> torch.nn.Module:
        """Return the draft's module, equal for equal cases."""
        torch.manual_seed(1)
        with self.batch.input_ids_T.device:
            return self.draft.build(self.target, self.tensors, self.token_counts, kernel)


def run_cases(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the row of each case. Where one does not fit the device's memory, ``failed`` says so."""
    for case in cases:
        try:
            yield run_case(case)
        except torch.OutOfMemoryError as error:
            yield asdict(case) | {"failed": f"out of memory: {str(error).splitlines()[0]}"}
        gc.collect()  # what the row's modules and autograd's graph hold in cycles
        if accelerator := torch.accelerator.current_accelerator(check_available=True):
            torch.get_device_module(accelerator).empty_cache()


def run_case(case: Case) -> dict[str, Any]:
    """Return the row of ``case``, measured in this process."""
    torch.set_num_threads(case.threads)
    plugin = plugins.load_available(Backend, case.backend)
    backend = plugin(plugin.Config(name=case.backend))
    with TemporaryDirectory() as folder:
        dist.init_process_group(
            backend.dist_backend, init_method=f"file://{folder}/group", rank=0, world_size=1
        )
        try:
            return _measure(case, backend)
        finally:
            dist.destroy_process_group()


def _measure(case: Case, backend: Backend) -> dict[str, Any]:
    """Return the row; ``peak_mib`` leaves out the imports, ``step_mib`` what is there before the first step."""
    device = backend.device(0)
    imported, _ = memory_mib(device)
    problem = make_problem(case, device)
    step = IMPLEMENTATIONS[case.implementation](problem, backend)
    ready, _ = memory_mib(device)
    forget_peak(device)
    losses: list[float] = []

    def run() -> None:
        losses.append(step())  # a number: the loss is there, and then the optimizer's work is waited for
        torch.get_device_module(device).synchronize()

    timed(run, case.warmup)
    timing = timed(run, case.repeats).summary()
    _, peak = memory_mib(device)
    shape = {name: getattr(case, name) for name in ("tokens", "sequences", "passes", "num_steps")}
    memory = {"peak_mib": peak - imported, "step_mib": peak - ready}
    rates = _rates(problem, timing["wall_ms"])
    profile = _profile(run, device, timing["wall_ms"]) if case.profile else {}
    return {
        "implementation": case.implementation,
        "device": device_name(device),
        **shape,
        **timing,
        **memory,
        **rates,
        "bare_tflops": bare_tflops(device, getattr(torch, case.dtype), min(8192, 4 * case.hidden_size)),
        **profile,
        "losses": losses,
    }


def _profile(step: Callable[[], object], device: torch.device, wall_ms: float) -> dict[str, Any]:
    """Return a step's kernels and waits; on a device also the ratio of the step's time to that of its kernels."""
    table = kernel_table(step, device)
    found = {"profile": table, "host_waits": host_waits(step, device)}
    if device.type == "cpu":
        return found
    counts = {"kernel_ms": table["total_ms"], "launches": table["calls"]}
    return found | counts | {"wall_over_kernels": wall_ms / table["total_ms"]}


def _rates(problem: Problem, wall_ms: float) -> dict[str, float]:
    case = problem.case
    rates = {name: 1e3 * count / wall_ms for name, count in _work(case).items()}
    if case.draft in NECESSARY_FLOPS:
        flops = case.passes * NECESSARY_FLOPS[case.draft](problem)
        rates["gflop"] = flops / 1e9
        if case.peak_tflops:
            rates["mfu"] = flops / (wall_ms * 1e9 * case.peak_tflops)
    return rates


def _work(case: Case) -> dict[str, int]:
    samples = case.passes * case.sequences
    return {"tokens_per_s": samples * case.tokens, "samples_per_s": samples}


def make_problem(case: Case, device: torch.device, target: TargetSpec | None = None) -> Problem:
    """Return target, draft and batch of ``case``, random but equal for equal cases; ``target`` has its shapes."""
    target = target or make_target(case)
    plugin = plugins.load_available(Draft, case.draft)
    draft = plugin(plugin.Config.model_validate({"name": case.draft, **case.draft_options()}))
    generator = torch.Generator(device).manual_seed(0)
    tensors = make_tensors(target, generator, draft.target_tensors(target))
    # Zipf's law, its ranks spread over the ids: most supervised tokens have a row in the draft's head.
    frequency_V = (1 / torch.arange(1.0, case.vocab_size + 1, device=device))[
        torch.randperm(case.vocab_size, generator=generator, device=device)
    ]
    next_ids = torch.multinomial(
        frequency_V, case.sequences * case.tokens + 1, replacement=True, generator=generator
    )
    batch = make_batch(case, draft.required_features(target), tensors, next_ids, generator)
    masks = [batch.loss_mask_T[span.start : span.stop] for span in batch.spans]
    supervision = [Supervision(sample_id=i, epoch=0, loss_mask=mask) for i, mask in enumerate(masks)]
    return Problem(
        case=case,
        draft=draft,
        target=target,
        tensors=tensors,
        token_counts=(frequency_V * 1e6).long(),
        batch=batch,
        denominators=draft.denominators(supervision),
    )


def make_target(case: Case) -> TargetSpec:
    """Return a target in proportions of Qwen3-8B: four queries per key head, an MLP of three times the width."""
    heads = case.num_heads or case.hidden_size // case.head_dim
    return TargetSpec(
        folder=Path("target"),
        architecture="LlamaForCausalLM",
        model_type="llama",
        digest="0" * 64,
        num_layers=36,
        hidden_size=case.hidden_size,
        intermediate_size=3 * case.hidden_size,
        num_heads=heads,
        num_kv_heads=case.num_kv_heads or max(1, heads // 4),
        head_dim=case.head_dim,
        vocab_size=case.vocab_size,
        max_positions=case.tokens,
        dtype=case.dtype,
        embedding_name="model.embed_tokens.weight",
        head_name="lm_head.weight",
        norm_name="model.norm.weight",
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_ids=(0,),
    )


def make_tensors(target: TargetSpec, generator: torch.Generator, others: Sequence[str] = ()) -> TargetTensors:
    """Return tensors with head rows so long that a state made of one gives its token most of the probability."""
    shape, dtype = (target.vocab_size, target.hidden_size), getattr(torch, target.dtype)
    embedding_VH = _randn(shape, generator) * 0.02
    head_VH = _randn(shape, generator) * (16 / target.hidden_size)
    norm_H = 1 + 0.1 * _randn((target.hidden_size,), generator)
    known = {target.embedding_name: embedding_VH, target.head_name: head_VH, target.norm_name: norm_H}
    known = {name: tensor.to(dtype) for name, tensor in known.items()}
    return TargetTensors(
        embedding_VH=known[target.embedding_name],
        head_VH=known[target.head_name],
        norm_H=known[target.norm_name],
        others={name: known[name] for name in others},
    )


def make_batch(
    case: Case, schema: FeatureSchema, tensors: TargetTensors, ids: Tensor, generator: torch.Generator
) -> DraftBatch:
    """Return random states, except that the final norm's input holds the next of ``ids``, under as much noise."""
    hidden_TNH = _randn(schema.shape(len(ids) - 1), generator)
    signal_TH = tensors.head_VH[ids[1:]].float()
    hidden_TNH[:, -1] += signal_TH / signal_TH.std()
    starts = range(0, len(ids) - 1, case.tokens)
    return DraftBatch(
        input_ids_T=ids[:-1],
        hidden_TNH=hidden_TNH.to(schema.torch_dtype()),
        loss_mask_T=torch.cat([_mask(case, generator) for _ in starts]).cpu(),
        spans=tuple(
            Span(sample_id=i, epoch=0, start=start, stop=start + case.tokens)
            for i, start in enumerate(starts)
        ),
    )


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _mask(case: Case, generator: torch.Generator) -> Tensor:
    if case.unsupervised is None:
        return _turns(case.tokens, generator)
    return torch.arange(case.tokens, device=generator.device) >= round(case.tokens * case.unsupervised)


def _turns(num_tokens: int, generator: torch.Generator) -> Tensor:
    """Return the mask [T] of a dialogue: questions of up to 60 tokens, answers (supervised) of up to 140."""
    device = generator.device
    longest = torch.tensor([60.0, 140.0], device=device) * min(1.0, num_tokens / 1000)
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    start = 0
    while start < num_tokens:
        question, answer = (torch.rand(2, generator=generator, device=device) * longest).long().tolist()
        mask[start + question : start + question + answer] = True
        start += question + answer + 1
    return mask


def strategy_step(problem: Problem, backend: Backend) -> Step:
    """Return the step that the trainer runs."""
    plugin = plugins.load_available(Strategy, "fsdp")
    settings = StepConfig(dtype=problem.case.dtype)
    strategy = plugin(plugin.Config(), settings, default_optimizer(), backend.device(0))
    layers = Fp8Layers(backend.kernel)
    in_layers = problem.case.fp8 == "layers"
    module = problem.build(layers.find if in_layers else backend.kernel)
    if in_layers:
        layers.attach(module)
    strategy.attach(module, problem.draft.shard_hints(problem.target))
    ops = strategy.vocabulary_ops(problem.target, problem.tensors)
    if problem.case.fp8:
        use_fp8_head(ops, backend.kernel)
    batches, denominators = problem.case.passes * [problem.batch], problem.case.passes * problem.denominators
    return lambda: strategy.step(batches, denominators, ops, LR).output.loss.item()


def default_optimizer() -> Optimizer:
    """Return the optimizer of a run that names none."""
    plugin = plugins.load_available(Optimizer, DEFAULT_PLUGINS["optimizer"])
    return plugin(plugin.Config())


def dense_step(problem: Problem, backend: Backend) -> Step:
    """Return a step with the same parameters, batch and optimizer around ``DenseEagle3``, on the CPU."""
    module, options = problem.build(no_kernel), default_optimizer().config
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    dense = DenseEagle3(
        weights=weights,
        ids_V=module.ids_V,
        target=problem.target,
        tensors=problem.tensors,
        num_steps=problem.case.num_steps,
        step_decay=problem.draft.config.step_decay,
    )
    optimizer = torch.optim.AdamW(
        weights.values(), LR, options.betas, options.eps, options.weight_decay, fused=True
    )
    return _plain_step(problem, dense.loss, optimizer, StepConfig().clip)


def modelopt_step(problem: Problem, backend: Backend, is_compiled: bool = False) -> Step:
    """Return the step of NVIDIA's Model-Optimizer on the same batch, from the same weights."""
    from modelopt_eagle3 import ModeloptEagle3

    case, options = problem.case, default_optimizer().config
    module = problem.build(no_kernel)
    theirs = ModeloptEagle3(problem.target, problem.tensors, module, case.num_steps, is_compiled)
    return _plain_step(problem, theirs.loss, theirs.optimizer(options, LR), StepConfig().clip)


def _plain_step(
    problem: Problem, loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer, clip: float
) -> Step:
    """Return a step of torch alone. ``loss_of`` takes ids, states and mask, each with sequences first."""
    shape, batch = (problem.case.sequences, problem.case.tokens), problem.batch
    flat = batch.input_ids_T, batch.hidden_TNH, batch.loss_mask_T.to(batch.input_ids_T.device)
    arguments = [tensor.unflatten(0, shape) for tensor in flat]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def step() -> float:
        loss = loss_of(*arguments)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


IMPLEMENTATIONS = {
    "strategy": strategy_step,
    "dense": dense_step,
    "modelopt": modelopt_step,
    "modelopt-compiled": partial(modelopt_step, is_compiled=True),
}
