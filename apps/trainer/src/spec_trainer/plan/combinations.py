"""This module has every combination of settings that is refused: which keys, why, and what to do instead.

``docs/combinations.md`` is generated from these tables. A check of one key alone is in its section's class; a check
against the data, the devices or a server is where those are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from spec_core import Config, Engine
from spec_core.errors import ConfigError
from spec_trainer.configuration.run import AnyRunConfig, DecodeConfig

_VALUE = re.compile(r"([a-z0-9_.]+)=\*")


@dataclass(frozen=True)
class Combination:
    """Settings that do not go together; ``KEY=*`` in a text stands for the key and its configured value."""

    settings: str
    why: str
    remedy: str
    refused: Callable[[AnyRunConfig, Any], bool]
    """Whether the configuration has these settings; the second argument is ``known`` of ``refuse``."""

    def message(self, config: AnyRunConfig) -> str:
        """Return the error message for ``config``, with the configured values."""
        return _VALUE.sub(lambda key: f"{key[1]}={_shown(config, key[1])}", str(self))

    def __str__(self) -> str:
        """Return the message without values."""
        return f"{self.settings}: {self.why}; {self.remedy}"


def refuse(table: Iterable[Combination], config: AnyRunConfig, known: object = None) -> None:
    """Raise ConfigError for the first combination of ``table`` that ``config`` has."""
    for combination in table:
        if combination.refused(config, known):
            raise ConfigError(combination.message(config))


def _shown(config: AnyRunConfig, key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _changed(section: Config, key: str) -> bool:
    """Return whether a key has another value than its default; the resolved ``config.yaml`` sets every key."""
    return getattr(section, key) != type(section).model_fields[key].default


def _is_inline(config: AnyRunConfig) -> bool:
    return config.placement.kind == "inline"


_ONE_PROCESS = "an inline engine lives in the one trainer process"
_NO_ENGINE = "features are read from a folder, and no engine starts"

_FEATURES = tuple(
    Combination(f"{settings} with data.features", _NO_ENGINE, "remove one of the two", refused)
    for settings, refused in (
        ("engine.replicas=*", lambda c, _: _stored(c) and c.engine.replicas > 1),
        ("engine.tensor_parallel=*", lambda c, _: _stored(c) and c.engine.tensor_parallel > 1),
        ("placement.window_bytes=*", lambda c, _: _stored(c) and c.placement.window_bytes is not None),
        ("placement.kind=colocated", lambda c, _: _stored(c) and c.placement.kind == "colocated"),
    )
)


def _stored(config: AnyRunConfig) -> bool:
    return config.data.features is not None


_PUSHES = (
    Combination(
        "train.push_every=* without push.to",
        "no server is named",
        "set push.to=[http://127.0.0.1:8000] or where yours is, or remove it",
        lambda c, _: c.train.push_every > 0 and not c.push.to and not c.decode.every,
    ),
    Combination(
        "push.to=* with train.push_every=0",
        "nothing is pushed",
        "set train.push_every or remove it",
        lambda c, _: c.train.push_every == 0 and bool(c.push.to),
    ),
    Combination(
        "push.canary_rounds=* without push.canary_margin",
        "nothing is reverted",
        "set push.canary_margin or remove it",
        lambda c, _: _changed(c.push, "canary_rounds") and c.push.canary_margin is None,
    ),
)

_PLACEMENT = (
    Combination(
        "engine.replicas=* with placement.kind=inline",
        _ONE_PROCESS,
        "set placement.kind=disaggregated or engine.replicas=1",
        lambda c, _: _is_inline(c) and c.engine.replicas > 1,
    ),
    Combination(
        "train.ranks=* with placement.kind=inline",
        _ONE_PROCESS,
        "set placement.kind=colocated or disaggregated, or train.ranks=1",
        lambda c, _: _is_inline(c) and c.train.ranks > 1,
    ),
    Combination(
        "engine.tensor_parallel=* with placement.kind=inline",
        _ONE_PROCESS,
        "set engine.tensor_parallel=1 or another placement",
        lambda c, _: _is_inline(c) and c.engine.tensor_parallel > 1,
    ),
    Combination(
        "decode.replicas=* with placement.kind=inline",
        _ONE_PROCESS,
        "set placement.kind=disaggregated or decode.replicas=1",
        lambda c, _: _is_inline(c) and c.decodes and c.decode.replicas > 1,
    ),
    Combination(
        "train.restarts=* with placement.kind=inline",
        "there is no second process that could restart it",
        "remove it or set another placement",
        lambda c, _: _is_inline(c) and c.train.restarts > 0,
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
        lambda c, _: _changed(c.train, "decay_share") and c.train.schedule != "wsd",
    ),
    Combination(
        "train.min_lr_ratio=* with train.schedule=constant",
        "a constant rate never falls",
        "remove it or set another schedule",
        lambda c, _: _changed(c.train, "min_lr_ratio") and c.train.schedule == "constant",
    ),
    Combination(
        "train.steps=* and train.epochs=*",
        "both say how long",
        "remove one",
        lambda c, _: _changed(c.train, "epochs") and c.train.steps is not None,
    ),
)

_DECODING = (
    Combination(
        "decode.on_policy=* without decode.every",
        "its answers are not trained on",
        "set decode.every or remove it",
        lambda c, _: c.decodes and not c.decode.every and c.decode.on_policy,
    ),
    *(
        Combination(
            f"decode.{key}=* without decode.every",
            "nothing is decoded",
            "set decode.every or remove it",
            lambda c, _, key=key: not c.decodes and _changed(c.decode, key),
        )
        for key in DecodeConfig.model_fields
        if key != "every"
    ),
    Combination(
        "train.serve_every=* with decode.every=*",
        "its cycles measure the draft",
        "remove one of them",
        lambda c, _: c.train.serve_every > 0 and c.decode.every > 0,
    ),
    *(
        Combination(f"{every}=* with {settings}", why, remedy, refused)
        for every, decodes in (
            ("train.serve_every", lambda c: c.train.serve_every > 0),
            ("decode.every", lambda c: c.decode.every > 0),
        )
        for settings, why, remedy, refused in (
            (
                "data.features",
                _NO_ENGINE,
                "remove one of them",
                lambda c, _, decodes=decodes: decodes(c) and _stored(c),
            ),
            (
                "push.to=*",
                "the run's own engine gets the draft",
                "remove one of them",
                lambda c, _, decodes=decodes: decodes(c) and bool(c.push.to),
            ),
            (
                "push.canary_margin=*",
                "the run's own engine has no other traffic",
                "remove it",
                lambda c, _, decodes=decodes: decodes(c) and c.push.canary_margin is not None,
            ),
        )
    ),
    Combination(
        "train.push_every=* with decode.every=*",
        "the engine decodes between cycles only",
        "set train.push_every to a multiple of decode.every, or 0 for no push",
        lambda c, _: c.decode.every > 0 and c.train.push_every % c.decode.every != 0,
    ),
)

KEYS = (*_FEATURES, *_PUSHES, *_PLACEMENT, *_SCHEDULE, *_DECODING)
"""Combinations that the configuration alone shows; refused by every command that reads one."""


def _is_outside(config: AnyRunConfig, engine_type: type[Engine]) -> bool:
    return not _stored(config) and _is_inline(config) and not engine_type.abilities.in_process


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
    Combination(
        "follow.servers=*",
        "only spec-trainer follow learns from servers",
        "remove it",
        lambda c, _: bool(c.follow.servers),
    ),
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
        lambda c, _: bool(c.follow.serve.arguments) and c.follow.serve.engine is None,
    ),
    Combination(
        "train.ranks=* with follow",
        "it trains in one rank",
        "set train.ranks=1",
        lambda c, _: c.train.ranks > 1,
    ),
    Combination(
        "train.restarts=* with follow",
        "it ends with a lost rank",
        "remove it, and start the command again",
        lambda c, _: c.train.restarts > 0,
    ),
    Combination(
        "train.schedule=* with follow",
        "it has no last step",
        "set train.schedule=constant",
        lambda c, _: c.train.schedule != "constant",
    ),
    Combination(
        "train.steps=* with follow",
        "it ends after a number of requests",
        "set follow.requests instead",
        lambda c, _: c.train.steps is not None,
    ),
    *(
        Combination(f"{key}=* with follow", "it judges the draft itself", "remove it", refused)
        for key, refused in (
            ("train.eval_every", lambda c, _: c.train.eval_every > 0),
            ("train.serve_every", lambda c, _: c.train.serve_every > 0),
            ("decode.every", lambda c, _: c.decode.every > 0),
            ("push.canary_margin", lambda c, _: c.push.canary_margin is not None),
        )
    ),
    Combination(
        "push.to=* with follow",
        "it pushes to the servers that it follows",
        "set follow.servers instead",
        lambda c, _: bool(c.push.to),
    ),
    Combination(
        "data.features=* with follow",
        "it captures the features of requests",
        "remove it",
        lambda c, _: _stored(c),
    ),
    *(
        Combination(
            f"{settings} with follow.capture=serving",
            "it has no engine of its own",
            remedy,
            lambda c, _, has=has: c.follow.capture == "serving" and has(c),
        )
        for settings, remedy, has in (
            ("placement.kind=*", "remove engine.name and placement.kind", lambda c: not _is_inline(c)),
            ("follow.retention.rows=*", "remove it", lambda c: c.follow.retention.rows > 0),
            ("follow.new_target=*", "remove it", lambda c: c.follow.new_target != "stop"),
            (
                "data.path",
                "remove it, or set follow.capture=prefill",
                lambda c: c.data.path is not None,
            ),
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
