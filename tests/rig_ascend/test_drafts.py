"""Every draft trains on an NPU as on the CPU, and computes with torch-npu's operators."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch_npu  # noqa: F401 (torch.npu)
from torch.utils._python_dispatch import TorchDispatchMode

from spec_backend_ascend.backend import AscendBackend
from spec_core import Draft, Optimizer, StepConfig, Strategy, plugins
from spec_kit.layers import TargetOps
from spec_kit.sharding import SafetensorsFolder
from spec_testing.processes import run_ranks
from spec_testing.reference import reference_backend
from spec_testing.toy_target import toy_batch, toy_samples, toy_target, toy_tensors

STEPS = 3
BLOCKS = {"block_size": 4, "num_layers": 2, "anchor_share": 1.0}
LATENT = {
    "attention": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
DRAFTS = {
    "eagle3": ("eagle3", {"num_steps": 3}),
    "eagle3 with a window": ("eagle3", {"num_steps": 3, "sliding_window": 6, "qk_norm": True}),
    "eagle3 with latent attention": ("eagle3", {"num_steps": 3, **LATENT}),
    "mtp": ("mtp", {"num_steps": 3}),
    "peagle": ("peagle", {"num_guesses": 3, "num_layers": 2, "segment_tokens": 9}),
    "dflash": ("dflash", BLOCKS),
    "dflash with a window": ("dflash", {**BLOCKS, "sliding_window": 4}),
    "dflash2": ("dflash2", {**BLOCKS, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}),
    "lilicorr": ("lilicorr", {**BLOCKS, "conv_group_size": 8, "lilicorr_hidden_size": 16}),
    "dspark": ("dspark", {**BLOCKS, "markov_rank": 8}),
}
EACH_DRAFT = pytest.mark.parametrize(("name", "options"), DRAFTS.values(), ids=DRAFTS)
OPERATORS = {
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
}


class Bench(NamedTuple):
    """A draft on a target, and three documents."""

    draft: Draft
    target: object
    tensors: object
    samples: list
    counts: torch.Tensor

    @classmethod
    def of(cls, name, options, folder):
        plugin = plugins.load(Draft, name)
        draft, target = plugin(plugin.Config(name=name, **options)), toy_target(folder)
        tensors = toy_tensors(target)
        tensors = tensors.__class__(**{**vars(tensors), "others": {target.norm_name: tensors.norm_H}})
        samples = toy_samples(draft.required_features(target), target, tensors, [12, 1, 20])
        return cls(
            draft, target, tensors, samples, draft.denominators([sample.supervision for sample in samples])
        )

    def batch(self, samples):
        return toy_batch(samples, self.draft.required_features(self.target), width=6)

    def module(self, backend, seed=0):
        torch.manual_seed(seed)
        return self.draft.build(self.target, self.tensors, None, plugins.find_kernel(backend))


@pytest.fixture
def bench(name, options, tmp_path):
    return Bench.of(name, options, tmp_path)


def built(bench, backend, dtype=torch.float32):
    """The module, and the arguments of its forward pass, on the backend's device."""
    device = backend.device(0)
    ops = TargetOps(bench.target, bench.tensors, device, dtype)
    arguments = bench.batch(bench.samples).to(device), bench.counts.to(device), ops
    return bench.module(backend).to(device, dtype), arguments


def trained(bench, backend):
    """Losses of some steps, gradients of the first, and the export after the last."""
    module, arguments = built(bench, backend)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4, fused=True)
    losses, gradients = [], {}
    for _ in range(STEPS):
        loss = module(*arguments).loss
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.cpu() for name, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return losses, gradients, dict(bench.draft.exported_tensors(weights, bench.target))


@EACH_DRAFT
def test_losses_gradients_and_export_are_the_cpu_backends(bench):
    expected, got = (trained(bench, backend) for backend in (reference_backend(), ascend()))
    assert got[0] == pytest.approx(expected[0], rel=1e-4)
    assert expected[0][-1] < expected[0][0]
    for ours, reference in zip(got[1:], expected[1:], strict=True):
        assert ours.keys() == reference.keys()
        for name, tensor in reference.items():
            assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def ascend():
    return AscendBackend(AscendBackend.Config())


def resumed(me, backend, folder):
    """name -> losses and gradient norms of two steps, the second of them again by a draft that was resumed."""
    device = backend.device(me.rank)
    torch.distributed.init_process_group(
        backend.dist_backend, f"file://{folder}/{backend.name}", rank=me.rank, world_size=me.world_size
    )
    found = {}
    for name, (_, options) in ((name, draft) for name, draft in DRAFTS.items() if name == draft[0]):
        bench, saved = Bench.of(name, options, folder), folder / f"{backend.name}-{name}"
        saved.mkdir(exist_ok=True)
        share = bench.batch(bench.samples[me.rank :: me.world_size]).to(device)
        numbers = []
        with new_strategy(device) as first, new_strategy(device) as second:
            for strategy, seed in ((first, 0), (second, 1)):
                strategy.attach(bench.module(backend, seed), bench.draft.shard_hints(bench.target))
                ops = strategy.vocabulary_ops(bench.target, bench.tensors)
                if seed:
                    strategy.load(SafetensorsFolder(saved))
                for _ in range(2 - seed):
                    done = strategy.step([share], bench.counts, ops, 1e-3)
                    numbers.append((done.output.loss.item(), done.grad_norm.item()))
                    if len(numbers) == 1:
                        strategy.save(SafetensorsFolder(saved))
            assert same(first.full_weights(), second.full_weights()), name
        found[name] = numbers
    torch.distributed.destroy_process_group()
    return found


def new_strategy(device):
    optimizer = plugins.load(Optimizer, "adamw")
    plugin = plugins.load(Strategy, "fsdp")
    config = plugin.Config(name="fsdp")
    return plugin(config, StepConfig(), optimizer(optimizer.Config(name="adamw")), device)


def same(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_two_ranks_train_every_draft_as_the_cpu_and_resume_to_the_bit(tmp_path):
    (expected,) = run_ranks(resumed, 1, reference_backend(), tmp_path)
    for got in run_ranks(resumed, 2, ascend(), tmp_path):
        for name, numbers in got.items():
            assert numbers[2] == numbers[1], name
            assert numbers == [pytest.approx(pair, rel=1e-4) for pair in expected[name]], name


class Called(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@EACH_DRAFT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_attention_of_a_step_is_computed_in_plain_torch(bench, dtype):
    module, arguments = built(bench, ascend(), dtype)
    with Called() as called:
        module(*arguments).loss.backward()
    plain = (
        {"npu_rms_norm"} if bench.draft.name == "mtp" else set()
    )  # this head stores its norms' weights minus 1
    assert called.times.keys() >= OPERATORS - plain, called.times
    own_softmax = bench.draft.name in ("dflash2", "lilicorr")  # of their heads
    assert own_softmax or not called.times.keys() & {"_softmax", "_safe_softmax"}
