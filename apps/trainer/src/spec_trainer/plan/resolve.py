"""Turn a command line into a RunSpec: read and check configuration, data and target; start nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_core import Backend, Engine, TargetSpec
from spec_core.errors import ConfigError
from spec_core.plugin_faults import checked_answer, raised_in
from spec_core.records import FeatureSchema, ShardHints
from spec_core.validation import validate
from spec_core.wording import counted
from spec_trainer.base.hub import resolve_target
from spec_trainer.configuration import read_configuration, read_resolved
from spec_trainer.configuration.follow import FOLLOW_DEFAULTS
from spec_trainer.configuration.plugin_names import named_plugin, with_plugin_names
from spec_trainer.configuration.push_options import absolute, anchor_options, transport_configs
from spec_trainer.configuration.run import SECTIONS, AnyRunConfig, run_config_type
from spec_trainer.configuration.track import track_config_type
from spec_trainer.data.dataset import Dataset
from spec_trainer.data.sources import check_apart
from spec_trainer.offline.folder import FeatureFolder
from spec_trainer.offline.store import open_features
from spec_trainer.plan import combinations
from spec_trainer.plan.activations import with_passes_that_fit
from spec_trainer.plan.fp8 import check_fp8
from spec_trainer.plan.images import check_sight, image_rules
from spec_trainer.plan.memory import RunSizes, rooms
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.dispatch import check_sizes, sample_bytes
from spec_trainer.run.spec import RunParts, RunSpec
from spec_trainer.run.trackers import check_trackers

log = logging.getLogger(__name__)

_PATHS = (
    (None, "target"),
    *(("data", key) for key in ("path", "eval_path", "features", "media_root")),
    ("draft", "init_from"),
)


def resolve(config_file: Path | None, flags: Mapping[str, object], overrides: Sequence[str]) -> RunSpec:
    """Return the run that a command line describes; create and start nothing.

    Raise UsageError, with a message of one line, if the command line or an input that it names is wrong.
    """
    parts, dataset = read_inputs(config_file, flags, overrides)
    run = parts.with_dataset(dataset)
    with _one_line():
        _check(run := with_passes_that_fit(run))
    return run


def _divided_as_begun(config: AnyRunConfig) -> AnyRunConfig:
    """Return the configuration with the run directory's ``train.balance`` and ``train.accumulation``.

    A key that the user has set keeps the user's value. So a resumed run has the same batches bit for bit.
    """
    file = RunDirectory(config.output).config
    if not os.path.isfile(file):
        return config
    with suppress(ConfigError):  # no run depends on that file
        begun = read_resolved(file).get("train")
        if isinstance(begun, dict):
            kept = {"balance", "accumulation"} - config.train.model_fields_set
            wanted = {key: begun[key] for key in kept & begun.keys()}
            values = validate(type(config.train), wanted, f"config {file}").model_dump(include=set(wanted))
            return config.model_copy(update={"train": config.train.model_copy(update=values)})
    return config


def read_inputs(
    config_file: Path | None,
    flags: Mapping[str, object],
    overrides: Sequence[str],
    *,
    follows: bool = False,
    output_type: type[RunDirectory | FeatureFolder] = RunDirectory,
) -> tuple[RunParts, Dataset]:
    """Return a run's RunParts and dataset (empty without data). Raise UsageError if an input is wrong.

    ``output_type``: what the command writes; an output that cannot be one is refused before the data is read.
    """
    from spec_kit.drafting.draft_files import check_finite
    from spec_trainer.data.kept import load_run_data

    with _one_line():
        config, types = resolve_config(config_file, flags, overrides, FOLLOW_DEFAULTS if follows else None)
        combinations.refuse(combinations.FOLLOW if follows else combinations.WITHOUT_FOLLOW, config)
        for data in filter(None, (config.data.path, config.data.eval_path)):
            check_apart(data, config.output)
        output_type(config.output).check_folder()
        parts = _load_parts(_divided_as_begun(config), types)
        if parts.config.draft.init_from is not None:
            check_finite(parts.config.draft.init_from)
        if parts.config.decodes:
            _check_decoder(parts)
        longest_prompt = parts.longest_prompt if parts.config.decode.every else None
        dataset = load_run_data(
            parts.config.data,
            parts.target.folder,
            parts.target.vocab_size,
            longest_prompt,
            with_questions=parts.config.train.serve_every > 0,
            run_directory=parts.config.output,
            images=image_rules(parts, follows=follows),
        )
        _check_positions(parts.target, dataset)
        return parts, dataset


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # the user has named every file that is read here, except by a plugin
        problem = f"{error.filename or type(error).__name__}: {error.strerror or error}"
        raise ConfigError(f"{problem}{raised_in(error, 'spec_trainer')}") from error


def _check(run: RunSpec) -> None:
    _check_held_out(run)
    if run.config.decode.every:
        _check_window(run)
    elif run.config.data.features is None:
        check_sizes(run.schedule, run.schema, run.window_bytes)
    else:
        open_features(run)
    run.members()
    run.directory.check_owner(run.identity)
    for room in rooms(run, RunSizes(run)):
        room.check()


def _check_decoder(parts: RunParts) -> None:
    """Raise ConfigError if the engine cannot decode with the draft in the way that the configuration says."""
    config = parts.config
    most = parts.draft.max_draft_tokens
    decode = config.decode
    wanted = parts.num_draft_tokens
    if most is not None and wanted > most:
        raise ConfigError(
            f"decode.num_draft_tokens={wanted}: draft {config.draft.name!r} guesses "
            f"{counted(most, 'token')} a round; lower it"
        )
    parts.engine_type.check_method(config.engine, parts.draft)
    if parts.longest_prompt < 1:
        raise ConfigError(
            f"decode.max_new_tokens={decode.max_new_tokens} leaves no room for a prompt: target "
            f"{parts.target.folder} has {parts.target.max_positions} positions, "
            f"engine.batch_tokens={config.engine.batch_tokens}; lower it"
        )


def _check_positions(target: TargetSpec, dataset: Dataset) -> None:
    """Raise ConfigError if a sample has more tokens than the target's largest context length."""
    longest = max(dataset.lengths, key=dataset.lengths.__getitem__, default=None)
    if longest is not None and dataset.lengths[longest] > target.max_positions:
        raise ConfigError(
            f"sample {longest} has {dataset.lengths[longest]} tokens, target {target.folder} has "
            f"{target.max_positions} positions; set data.max_length={target.max_positions} or less"
        )


def _check_window(run: RunSpec) -> None:
    """Raise ConfigError if ``placement.window_bytes`` is too small for the longest prompt and answer."""
    window = run.config.placement.window_bytes
    longest = run.longest_sample
    size = sample_bytes(run.schema, longest)
    if window is not None and size > window:
        raise ConfigError(
            f"placement.window_bytes={window} is smaller than a prompt with its answer ({longest} tokens, {size} "
            f"bytes of features); raise it to {size} or lower decode.max_new_tokens"
        )


def _check_held_out(run: RunSpec) -> None:
    for key in ("eval_every", "serve_every"):
        steps = getattr(run.config.train, key)
        if steps and not run.dataset.held_out:
            raise ConfigError(
                f"train.{key}={steps}, but nothing is held out of {counted(len(run.dataset.train), 'sample')}; set "
                "data.eval_path or data.eval_samples, or remove it"
            )
    if run.config.train.serve_every and not run.serving_prompts:
        raise ConfigError(
            f"train.serve_every={run.config.train.serve_every}, but none of "
            f"{counted(len(run.dataset.held_out), 'held-out sample')} has a prompt of at most {run.longest_prompt} "
            "tokens; lower decode.max_new_tokens or remove it"
        )


def resolve_parts(values: Mapping[str, Any]) -> RunParts:
    """Return the RunParts of a run, for a worker process, from the values of its resolved configuration."""
    return _load_parts(*_validated(dict(values), "configuration of the run"))


def _load_parts(config: AnyRunConfig, types: Mapping[str, Any]) -> RunParts:
    from spec_kit.targets.target_reader import check_target_tensors, read_target

    backend, draft = types["backend"](config.backend), types["draft"](config.draft)
    _check_dtype(config, backend)
    check_trackers(config.track)
    target = read_target(resolve_target(config.target))
    draft.check_target(target)
    tensors = checked_answer(draft.target_tensors(target), Sequence, draft, "target_tensors")
    check_target_tensors(target, tensors)
    features = checked_answer(draft.required_features(target), FeatureSchema, draft, "required_features")
    hints = checked_answer(draft.shard_hints(target), ShardHints, draft, "shard_hints")
    if config.data.features is None:
        check_sight(config, types["engine"], target)
        types["engine"].check_target(config.engine, target)
        types["engine"].check_capture(config.engine, features)
    types["strategy"].check(config.strategy, target, hints)
    if config.train.fp8 is not None:
        check_fp8(config, target)
    parts = RunParts(
        config=config.model_copy(update={"draft": draft.config}),
        backend=backend,
        draft=draft,
        engine_type=types["engine"],
        optimizer=types["optimizer"](config.optimizer),
        strategy_type=types["strategy"],
        launcher_type=types["launcher"],
        target=target,
        schema=replace(features, sent_dtype=config.data.features_dtype),
    )
    combinations.refuse(combinations.PARTS, config, parts)
    return parts


def resolve_config(
    config_file: Path | None,
    flags: Mapping[str, object],
    overrides: Sequence[str],
    defaults: Mapping[str, object] | None = None,
) -> tuple[AnyRunConfig, dict[str, Any]]:
    """Return the validated configuration, and the plugin class of each section that names a plugin."""
    values = read_configuration(config_file, flags, overrides, defaults)
    values.setdefault("output", str(_default_output(config_file, values)))
    _anchor(values)
    return _validated(values, f"config {config_file}" if config_file else "configuration")


def resolved_config(file: Path) -> tuple[AnyRunConfig, dict[str, Any]]:
    """Return configuration and plugin classes from ``config.yaml`` of a run or of a checkpoint."""
    return _validated(read_resolved(file), f"config {file}")


def _anchor(values: dict[str, Any]) -> None:
    """Make paths absolute, so that ``config.yaml`` means the same from any working directory.

    A value that may also be a name, such as a hub repository, is a path if that path exists.
    """
    for section, key in _PATHS:
        part = values if section is None else values.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), str):
            path = absolute(part[key])
            part[key] = path if os.path.exists(path) else part[key]
    push = values.get("push")
    if isinstance(push, dict):
        if isinstance(push.get("folder"), str):
            push["folder"] = absolute(push["folder"])
        if "options" in push:
            push["options"] = anchor_options(push["options"])


def _validated(values: dict[str, Any], source: str) -> tuple[AnyRunConfig, dict[str, Any]]:
    types: dict[str, Any] = {kind: named_plugin(interface, values) for kind, interface in SECTIONS.items()}
    model = run_config_type(
        **{kind: plugin.Config for kind, plugin in types.items()},
        track=track_config_type(values.get("track", {})),
    )
    _set_default_placement(values, types["engine"])
    config = validate(model, with_plugin_names(values), source)
    transport_configs(config.push.options, source)
    combinations.refuse(combinations.KEYS, config)
    combinations.refuse(combinations.ENGINE, config, types["engine"])
    return config, types


def _set_default_placement(values: dict[str, Any], engine_type: type[Engine]) -> None:
    """Set the default of ``placement.kind`` if the engine has processes of its own or features are stored."""
    placement = values.setdefault("placement", {})
    if not isinstance(placement, dict):
        return
    if _key(values, "data", "features") is None:
        if not engine_type.abilities.in_process:
            placement.setdefault("kind", "colocated")
    elif _key(values, "train", "ranks") not in (None, 1):
        placement.setdefault("kind", "disaggregated")


def _key(values: Mapping[str, Any], section: str, key: str) -> Any:
    part = values.get(section)
    return part.get(key) if isinstance(part, dict) else None


def _default_output(config_file: Path | None, values: Mapping[str, Any]) -> Path:
    return Path("runs") / (config_file.stem if config_file else Path(str(values.get("target", "run"))).name)


def _check_dtype(config: AnyRunConfig, backend: Backend) -> None:
    dtypes = backend.capabilities().dtypes
    if config.train.dtype not in dtypes:
        raise ConfigError(
            f"train.dtype={config.train.dtype}: backend {config.backend.name!r} trains in {', '.join(sorted(dtypes))}"
        )
