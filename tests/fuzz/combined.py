"""Keys together that may not go together: ``plan`` takes or refuses them, whatever else there is."""

import random
from pathlib import Path

_WORDS = [
    "train.ranks=2", "train.ranks=3", "train.ranks=4", "placement.kind=inline", "placement.kind=colocated",
    "placement.kind=disaggregated", "placement.trainer_fraction=0.6", "placement.engine_fraction=0.6",
    "placement.window_bytes=1", "strategy.replicate=2", "strategy.replicate=3", "strategy.context_parallel=2",
    "strategy.context_parallel=3", "engine.replicas=2", "engine.tensor_parallel=2", "engine.batch_tokens=8",
    "decode.every=2", "decode.replicas=2", "decode.on_policy=true", "decode.max_new_tokens=4", "decode.prompts=1",
    "decode.num_draft_tokens=99", "train.serve_every=1", "train.push_every=1", "train.push_every=3",
    "train.eval_every=1", "train.restarts=1", "train.schedule=wsd", "train.schedule=constant",
    "train.decay_share=0.5", "train.min_lr_ratio=0.5", "train.steps=2", "train.epochs=2", "train.fp8=layers",
    "train.dtype=bfloat16", "train.accumulation=7", "train.global_batch_tokens=1", "push.to=[http://127.0.0.1:1]",
    "push.canary_margin=0.1", "push.canary_rounds=5", "push.transport=[file]", "push.transport=[nothing]",
    "data.features=FEATURES", "data.eval_samples=2", "data.eval_samples=99", "data.eval_path=DATA",
    "data.max_length=2", "data.packing=true", "data.last_turn_only=true", "capture.shard_bytes=1",
    "follow.servers=[http://127.0.0.1:1]", "follow.capture=serving", "draft.name=mtp", "draft.name=dflash",
    "draft.name=dspark", "draft.name=peagle", "draft.name=eagle3", "draft.init_from=TARGET", "draft.init_from=DRAFT",
    "draft.vocab_size=100", "draft.num_steps=9", "draft.block_size=3", "draft.num_layers=40",
    "optimizer.name=muon", "strategy.name=megatron", "launcher.name=ray", "launcher.name=local", "engine.name=vllm",
    "engine.name=sglang", "backend.name=cuda", "backend.name=cpu", "profile.steps=[0]", "timeouts.peer_s=0.001",
    "track.wandb.project=x", "seed=1",
]  # fmt: skip


def combined(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """Draw two to five such words."""
    target = root / draw.choice(["target", "headed"])
    places = {
        "FEATURES": root / "features",
        "DATA": root / "rows.jsonl",
        "DRAFT": root / "eagle3",
        "TARGET": target,
    }
    words = draw.sample(_WORDS, draw.choice([2, 2, 3, 5]))
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    given = ["--target", target, "--data", root / "tokens.jsonl", "--output", folder / "out"]
    return " ".join(word[-40:] for word in words), ["plan", *given, *words]
