"""This module has every combination of keys or options that is refused: which, why, and what to do instead.

``docs/combinations.md`` is generated from these tables. A check of one key or option alone is in its class; a check
against the data, the devices or a server is where those are read.
"""

from __future__ import annotations

from spec_core import Engine
from spec_trainer.configuration.run import AnyRunConfig, DecodeConfig
from spec_trainer.plan.refusal import Combination, changed, refuse

__all__ = [
    "CAPTURE",
    "ENGINE",
    "EVALUATE",
    "EXPORT",
    "FOLLOW",
    "KEYS",
    "PARTS",
    "QUICKSTART",
    "WITHOUT_FOLLOW",
    "refuse",
]

_ONE_PROCESS = "an inline engine lives in the one trainer process"
_NO_ENGINE = "features are read from a folder, and no engine starts"

_FEATURES = tuple(
    Combination(f"{setting} with data.features", _NO_ENGINE, "remove one of the two")
    for setting in (
        "engine.replicas=*", "engine.tensor_parallel=*", "placement.window_bytes=*", "placement.kind=colocated",
    )
)  # fmt: skip

_HELD_OUT = (
    Combination(
        "data.eval_path=* with data.eval_samples=*",
        "both say what is held out",
        "remove one",
        lambda c, _: c.data.eval_path is not None and bool(c.data.eval_samples),
    ),
)

_PUSHES = (
    Combination(
        "train.push_every=* without push.to",
        "no server is named",
        "set push.to=[http://127.0.0.1:8000] or where yours is, or remove it",
        lambda c, _: c.train.push_every > 0 and not c.push.to and not c.decode.every,
    ),
    Combination(
        "push.to=* with train.push_every=0", "nothing is pushed", "set train.push_every or remove it"
    ),
    Combination(
        "push.canary_rounds=* without push.canary_margin",
        "nothing is reverted",
        "set push.canary_margin or remove it",
    ),
)

_PLACEMENT = (
    *(
        Combination(f"{setting}=* with placement.kind=inline", _ONE_PROCESS, remedy)
        for setting, remedy in (
            ("engine.replicas", "set placement.kind=disaggregated or engine.replicas=1"),
            ("train.ranks", "set placement.kind=colocated or disaggregated, or train.ranks=1"),
            ("engine.tensor_parallel", "set engine.tensor_parallel=1 or another placement"),
        )
    ),
    Combination(
        "decode.replicas=* with placement.kind=inline",
        _ONE_PROCESS,
        "set placement.kind=disaggregated or decode.replicas=1",
        lambda c, _: c.placement.kind == "inline" and c.decodes and c.decode.replicas > 1,
    ),
    Combination(
        "train.restarts=* with placement.kind=inline",
        "there is no second process that could restart it",
        "remove it or set another placement",
    ),
    *(
        Combination(
            f"placement.{key}=* with placement.kind=*",
            "only colocated processes share a device",
            "remove it or set placement.kind=colocated",
            lambda c, _, key=key: c.placement.kind != "colocated" and getattr(c.placement, key) is not None,
        )
        for key in ("trainer_fraction", "engine_fraction")
    ),
    Combination(
        "placement.trainer_fraction=* with placement.engine_fraction=*",
        "together they exceed the device",
        "their sum must be <= 1",
        lambda c, _: (c.placement.trainer_fraction or 0) + (c.placement.engine_fraction or 0) > 1,
    ),
)

_SCHEDULE = (
    Combination(
        "train.decay_share=* with train.schedule=*",
        "only wsd decays at the end",
        "remove it or set train.schedule=wsd",
        lambda c, _: changed(c, "train.decay_share") and c.train.schedule != "wsd",
    ),
    Combination(
        "train.min_lr_ratio=* with train.schedule=constant",
        "a constant rate never falls",
        "remove it or set another schedule",
    ),
    Combination("train.steps=* and train.epochs=*", "both say how long", "remove one"),
)

_DECODING = (
    Combination(
        "decode.on_policy=* without decode.every",
        "its answers are not trained on",
        "set decode.every or remove it",
        lambda c, _: c.decodes and not c.decode.every and c.decode.on_policy,
    ),
    Combination(
        "draft.opd=* without decode.on_policy",
        "no guess was judged",
        "set decode.on_policy=true or remove it",
        lambda c, _: getattr(c.draft, "opd", False) and not c.decode.on_policy,  # an option of some drafts
    ),
    *(
        Combination(
            f"decode.{key}=* without decode.every",
            "nothing is decoded",
            "set decode.every or remove it",
            lambda c, _, key=key: not c.decodes and changed(c, f"decode.{key}"),
        )
        for key in DecodeConfig.model_fields
        if key != "every"
    ),
    Combination(
        "train.serve_every=* with decode.every=*", "its cycles measure the draft", "remove one of them"
    ),
    *(
        Combination(f"{every}=* with {settings}", why, remedy)
        for every in ("train.serve_every", "decode.every")
        for settings, why, remedy in (
            ("data.features", _NO_ENGINE, "remove one of them"),
            ("push.to=*", "the run's own engine gets the draft", "remove one of them"),
            ("push.canary_margin=*", "the run's own engine has no other traffic", "remove it"),
        )
    ),
    Combination(
        "train.push_every=* with decode.every=*",
        "the engine decodes between cycles only",
        "set train.push_every to a multiple of decode.every, or 0 for no push",
        lambda c, _: c.decode.every > 0 and c.train.push_every % c.decode.every != 0,
    ),
)

KEYS = (*_FEATURES, *_HELD_OUT, *_PUSHES, *_PLACEMENT, *_SCHEDULE, *_DECODING)
"""Combinations that the configuration alone shows; refused by every command that reads one."""


def _is_outside(config: AnyRunConfig, engine_type: type[Engine]) -> bool:
    starts = config.data.features is None and config.placement.kind == "inline"
    return starts and not engine_type.abilities.in_process


ENGINE = (
    Combination(
        "placement.kind=inline with engine.name=*",
        "this engine runs in processes of its own",
        "set placement.kind=colocated or disaggregated",
        _is_outside,
    ),
)
"""Combinations that depend on the class of the engine plugin, which is the second argument of ``refused``."""

WITHOUT_FOLLOW = (
    Combination("follow.servers=*", "only spec-trainer follow learns from servers", "remove it"),
    Combination(
        "no data.path",
        "nothing says what to train on",
        "data.path is required, such as data.path=VALUE",
        lambda c, _: c.data.path is None,
    ),
)
"""Combinations that every command but ``spec-trainer follow`` refuses."""

FOLLOW = (
    Combination(
        "draft.vocab_size=* with follow without data",
        "the most frequent tokens are counted in the data",
        "remove it, or set data.path",
        lambda c, _: (
            getattr(c.draft, "vocab_size", None) is not None  # an option of some drafts
            and c.data.path is None
            and c.draft.init_from is None
        ),
    ),
    Combination(
        "follow without follow.servers",
        "it needs a server",
        "give --server with an address such as http://127.0.0.1:8000, or --serve ENGINE to start one",
        lambda c, _: not c.follow.servers and c.follow.serve.engine is None,
    ),
    Combination(
        "follow.serve.arguments=* without follow.serve.engine",
        "the command starts no server",
        "add --serve ENGINE, or remove it",
    ),
    Combination("train.ranks=* with follow", "it trains in one rank", "set train.ranks=1"),
    Combination(
        "train.restarts=* with follow", "it ends with a lost rank", "remove it, and start the command again"
    ),
    Combination(
        "train.schedule=* with follow",
        "it has no last step",
        "set train.schedule=constant",
        lambda c, _: c.train.schedule != "constant",
    ),
    Combination(
        "train.steps=* with follow", "it ends after a number of requests", "set follow.requests instead"
    ),
    *(
        Combination(f"{key}=* with follow", "it judges the draft itself", "remove it")
        for key in ("train.eval_every", "train.serve_every", "decode.every", "push.canary_margin")
    ),
    Combination("data.eval_path=* with follow", "it holds out requests", "remove it"),
    Combination(
        "push.to=* with follow", "it pushes to the servers that it follows", "set follow.servers instead"
    ),
    Combination("data.features=* with follow", "it captures the features of requests", "remove it"),
    *(
        Combination(f"{setting} with follow.capture=serving", "it has no engine of its own", remedy)
        for setting, remedy in (
            ("placement.kind=*", "remove engine.name and placement.kind"),
            ("follow.retention.rows=*", "remove it"),
            ("follow.new_target=*", "remove it"),
            ("data.features_dtype=*", "remove it"),
            ("data.path", "remove it, or set follow.capture=prefill"),
        )
    ),
)
"""Combinations that ``spec-trainer follow`` refuses."""


PARTS = (
    Combination(
        "decode.on_policy=true with draft.name=*",
        "this draft does not learn from judged guesses",
        "remove it",
        lambda c, parts: c.decodes and c.decode.on_policy and not parts.draft.learns_from_guesses,
    ),
    Combination(
        "decode.on_policy=true with engine.name=*",
        "this engine does not say which guesses it judged",
        "remove it",
        lambda c, parts: c.decodes and c.decode.on_policy and not parts.engine_type.abilities.guess_depths,
    ),
    *(
        Combination(
            f"train.{key}=* with engine.name=*",
            "this engine takes no fresh weights while it serves",
            f"set train.{key}=0",
            lambda c, parts, key=key: (
                c.decodes and getattr(c.train, key) > 0 and not parts.engine_type.abilities.fresh_weights
            ),
        )
        for key in ("serve_every", "push_every")
    ),
    Combination(
        "train.fp8=* with train.dtype=*",
        "what is not in fp8 is in bfloat16",
        "set train.dtype=bfloat16 or remove train.fp8",
        lambda c, _: c.train.fp8 is not None and c.train.dtype != "bfloat16",
    ),
    Combination(
        "train.fp8=* with backend.name=*",
        "this backend has no fp8 products here",
        "remove it",
        lambda c, parts: c.train.fp8 is not None and not parts.backend.capabilities().fp8,
    ),
    Combination(
        "train.fp8=* with strategy.name=*",
        "this strategy does not compute in fp8",
        "remove it",
        lambda c, parts: c.train.fp8 is not None and not parts.strategy_type.takes_fp8,
    ),
)
"""Combinations that depend on the plugins of a run; the second argument of ``refused`` is its ``RunParts``."""

CAPTURE = (
    Combination(
        "data.features=* with capture",
        "it makes such a folder",
        "remove it, and name the folder with --output",
    ),
)
"""Combinations that ``spec-trainer capture`` refuses."""

_AS_STARTED = "a server runs and drafts as it was started"
_MOST_REQUESTS = 1024
"""Largest number of concurrent requests to a server; each needs a thread and a connection."""

_OF_AN_ENGINE = (
    "--target=*", "--draft-model=*", "--draft=*", "--engine=*", "--backend=*", "--num-draft-tokens=*", "--untrained",
    "--breakdown", "--by-length", "--card",
)  # fmt: skip

EVALUATE = (
    *(
        Combination(f"{option} with --server", _AS_STARTED, "remove one of the two")
        for option in _OF_AN_ENGINE
    ),
    Combination(
        "--concurrency=* with --server",
        "each request at once needs a thread and a connection",
        f"give {_MOST_REQUESTS} or less",
        lambda r, _: bool(r.server) and max(r.concurrencies, default=1) > _MOST_REQUESTS,
    ),
    Combination(
        "--baseline-server=* without --server", "it is compared with another server", "add --server URL"
    ),
    Combination(
        "--draft=* without --breakdown", "only a breakdown draws random weights", "give --draft-model FOLDER"
    ),
    Combination(
        "evaluate without --target and --draft-model",
        "nothing says what to measure",
        "give both, or --server URL",
        lambda r, _: not (r.server or r.breakdown or (r.target and r.draft_model)),
    ),
    Combination(
        "--breakdown without one of --draft-model and --draft",
        "it measures one draft",
        "give --draft-model FOLDER or --draft NAME",
        lambda r, _: r.breakdown and bool(r.draft_model) == bool(r.draft),
    ),
    Combination("--breakdown without --target", "it measures on a target", "add --target"),
    *(
        Combination(
            f"{option} with --breakdown", "it decodes greedily and prints a table", "remove one of the two"
        )
        for option in ("--temperature=*", "--untrained", "--by-length", "--card", "--report=*")
    ),
    Combination("--bench=* with --breakdown", "it takes prompts from a file", "give --prompts FILE instead"),
    Combination("--prompts=* with --bench=*", "both name the prompts", "remove one of the two"),
    Combination(
        "evaluate without --prompts and --bench",
        "nothing says what to ask",
        "give --prompts FILE, or --bench NAMES such as gsm8k,mt_bench",
        lambda r, _: not r.prompts and not r.bench,
    ),
    Combination(
        "--bench-data=* without --bench", "it holds the rows of benchmarks", "add --bench NAMES or remove it"
    ),
    Combination(
        "several numbers in --num-draft-tokens=* with --breakdown",
        "it takes one",
        "give one number",
        lambda r, _: r.breakdown and len(r.draft_token_counts) > 1,
    ),
    Combination(
        "several numbers in --num-draft-tokens=* without --concurrency",
        "they are compared at each concurrency",
        "add --concurrency, such as 1,8,32",
        lambda r, _: len(r.draft_token_counts) > 1 and not r.concurrency,
    ),
)
"""Combinations of options that ``spec-trainer evaluate`` refuses."""

_ONLY_A_FOLDER = "only the folder of a draft is written in 8 bits"

EXPORT = (
    Combination("--whole-target with --format=*", "it writes a folder", "remove one of the two"),
    Combination("--dtype=* with --whole-target", _ONLY_A_FOLDER, "remove one of the two"),
    Combination("--dtype=* with --format=*", _ONLY_A_FOLDER, "remove one of the two"),
    Combination(
        "--prompts=* without --dtype",
        "they show what 8 bits change",
        "add --dtype, or run spec-trainer evaluate, which measures any draft",
    ),
    Combination(
        "--push-to-hub=* with --format=* of one file",
        "the hub gets a folder",
        "remove one of the two",
        lambda options, written: bool(options.push_to_hub) and written is not None and not written.is_folder,
    ),
)
"""Combinations of options that ``spec-trainer export`` refuses."""

QUICKSTART = tuple(
    Combination(
        f"{option}=* without --target",
        "--data and --budget are for --target",
        "name the target that the draft is for",
    )
    for option in ("--data", "--budget")
)
"""Combinations of options that ``spec-trainer quickstart`` refuses."""
