"""A scheduler of SGLang with a target and a draft of torch modules."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from spec_engine_sglang.sglang_draft_slot import SglangDraftSlot
from spec_kit.weight_sync import DraftLayout


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))


class Fused(nn.Module):
    """A layer whose parameter loads itself, part by part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * width, width))
        self.weight.weight_loader = self.weight_loader
        self.width = width

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: int) -> None:
        parameter.data[shard * self.width : (shard + 1) * self.width].copy_(loaded)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5))


class Layer(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.kv = Fused(4)
        self.norm = Norm(4)
        self.rotary = rotary


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.rotary = Rotary()


class Draft(nn.Module):
    """As SGLang's Eagle3: its embedding's weight is the target's, its token ids are replaced by loading."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.embed_tokens.weight = target.embed_tokens.weight
        self.layers = nn.ModuleList([Layer(target.rotary), Layer(target.rotary)])
        self.lm_head = nn.Linear(4, 3, bias=False)
        self.tied = self.lm_head
        self.own_rotary = Rotary()
        self.hot_token_id: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            if name == "d2t":
                assert loaded.is_cpu
                self.hot_token_id = loaded + torch.arange(len(loaded))
                continue
            stacked, _, shard = name.partition("#")
            if stacked in parameters:
                if shard:
                    parameters[stacked].weight_loader(parameters[stacked], loaded, int(shard))
                else:
                    parameters[stacked].data.copy_(loaded)


class Confidence(nn.Module):
    """As the head of SGLang's DSpark: it keeps its last output, and temperatures that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 1)
        self.register_buffer("sts_temperatures", torch.ones(()), persistent=False)
        self._last_confidence_raw: Tensor | None = None


class BlockDraft(Draft):
    """As SGLang's DSpark: the target's head is a module of the draft, and further heads belong to the draft."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.tied = self.lm_head = target.lm_head
        self.markov_head = nn.ModuleDict({"markov_w1": nn.Embedding(7, 2), "markov_w2": Norm(7)})
        self.confidence_head = Confidence()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(
            pair for pair in weights if not pair[0].startswith(("lm_head.", "embed_tokens."))
        )


class Stacking:
    """As SGLang's helper: what it derives from the layers' weights lies in memory of its own."""

    def __init__(self, layers, rotary_emb, num_kv_heads, head_dim, device, max_position_hint=None) -> None:
        self.rotary_emb, self.num_kv_heads, self.head_dim = rotary_emb, num_kv_heads, head_dim
        self.device = device
        self.flat_kv_weight_t = torch.cat([layer.kv.weight for layer in layers]).T.contiguous()
        self.k_norm_weights = torch.stack([layer.norm.weight for layer in layers])
        self._workspace = torch.randn(3)


def export(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    layers = {
        name: torch.randn(size, generator=draw)
        for index in range(2)
        for name, size in (
            (f"layers.{index}.kv.weight#0", (4, 4)),
            (f"layers.{index}.kv.weight#1", (4, 4)),
            (f"layers.{index}.norm.weight", (4,)),
        )
    }
    others = {name: torch.randn(size, generator=draw) for name, size in (("lm_head.weight", (3, 4)),)}
    embedding = {"embed_tokens.weight": torch.randn(7, 4, generator=draw)}
    return {**layers, **others, **embedding, "d2t": torch.tensor([0, 1, 3])}


class Scheduler(SimpleNamespace):
    @classmethod
    def serving(cls, algorithm: str = "DFLASH", **changes: object) -> Scheduler:
        torch.manual_seed(0)
        target = Target()
        draft = (BlockDraft if algorithm == "DSPARK" else Draft)(target)
        with torch.no_grad():
            draft.load_weights(export(1).items())
        runner = SimpleNamespace(model=draft, model_config=SimpleNamespace(quantization=None))
        layers = draft.layers
        helper = Stacking(layers, target.rotary, 1, 4, torch.device("cpu")) if algorithm == "DFLASH" else None
        worker = SimpleNamespace(draft_worker=SimpleNamespace(model_runner=runner), _fused_kv_helper=helper)
        return cls(
            spec_algorithm=SimpleNamespace(
                name=algorithm,
                is_eagle3=lambda: algorithm == "EAGLE3",
                is_dflash=lambda: algorithm == "DFLASH",
                is_dspark=lambda: algorithm == "DSPARK",
            ),
            server_args=SimpleNamespace(**({"dp_size": 1, "pp_size": 1} | changes)),
            draft_worker=worker,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
            target=target,
            draft=draft,
        )


def slot_of(scheduler: Scheduler) -> SglangDraftSlot:
    return SglangDraftSlot(scheduler, DraftLayout.of_tensors(export(1).items(), "target"))
