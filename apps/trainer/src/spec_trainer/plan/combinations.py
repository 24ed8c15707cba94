"""This module has every combination of settings that is refused: which keys, why, and what to do instead.

``docs/combinations.md`` is generated from these tables. A check of one key alone is in its section's class; a check
against the data, the devices or a server is where those are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from spec_core import Engine
from spec_core.errors import ConfigError
from spec_trainer.configuration.run import AnyRunConfig, DecodeConfig

_VALUE = re.compile(r"([a-z0-9_.]+)=\*")
_CLAUSE = re.compile(r"(without )?((?:[a-z0-9_]+\.)+[a-z0-9_]+)(?:=(\S+))?")


@dataclass(frozen=True)
class Combination:
    """Settings that do not go together; ``KEY=*`` in a text stands for the key and its configured value."""

    settings: str
    why: str
    remedy: str
    refused: Callable[[AnyRunConfig, Any], bool] | None = None
    """Whether the configuration has these settings; the second argument is ``known`` of ``refuse``. None: if it is as
    ``settings`` says, with each named key set to another value than its default, or to the value given, or unset
    behind ``without``."""

    def is_in(self, config: AnyRunConfig, known: object) -> bool:
        """Return whether ``config`` has these settings."""
        if self.refused is not None:
            return self.refused(config, known)
        return all(_holds(config, *clause.groups()) for clause in _CLAUSE.finditer(self.settings))

    def message(self, config: AnyRunConfig) -> str:
        """Return the error message for ``config``, with the configured values."""
        return _VALUE.sub(lambda key: f"{key[1]}={_shown(config, key[1])}", str(self))

    def __str__(self) -> str:
        """Return the message without values."""
        return f"{self.settings}: {self.why}; {self.remedy}"


def refuse(table: Iterable[Combination], config: AnyRunConfig, known: object = None) -> None:
    """Raise ConfigError for the first combination of ``table`` that ``config`` has."""
    for combination in table:
        if combination.is_in(config, known):
            raise ConfigError(combination.message(config))


def _shown(config: AnyRunConfig, key: str) -> str:
    value: Any = attrgetter(key)(config)
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _holds(config: AnyRunConfig, without: str | None, key: str, value: str | None) -> bool:
    if value not in (None, "*"):
        return _shown(config, key) == value
    return _changed(config, key) != bool(without)


def _changed(config: AnyRunConfig, key: str) -> bool:
    """Return whether a key has another value than its default; the resolved ``config.yaml`` sets every key."""
    section, _, name = key.rpartition(".")
    found = attrgetter(section)(config)
    return getattr(found, name) != type(found).model_fields[name].default


_ONE_PROCESS = "an inline engine lives in the one trainer process"
_NO_ENGINE = "features are read from a folder, and no engine starts"

_FEATURES = tuple(
    Combination(f"{setting} with data.features", _NO_ENGINE, "remove one of the two")
    for setting in (
        "engine.replicas=*", "engine.tensor_parallel=*", "placement.window_bytes=*", "placement.kind=colocated",
    )
)  # fmt: skip

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
        lambda c, _: _changed(c, "train.decay_share") and c.train.schedule != "wsd",
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
    *(
        Combination(
            f"decode.{key}=* without decode.every",
            "nothing is decoded",
            "set decode.every or remove it",
            lambda c, _, key=key: not c.decodes and _changed(c, f"decode.{key}"),
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

KEYS = (*_FEATURES, *_PUSHES, *_PLACEMENT, *_SCHEDULE, *_DECODING)
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
