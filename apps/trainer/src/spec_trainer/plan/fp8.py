"""Check whether a run may compute products in 8-bit floating point (``train.fp8``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_kit.drafting import FP8_MULTIPLE

if TYPE_CHECKING:
    from spec_core import Backend, Strategy, TargetSpec
    from spec_trainer.configuration.run import AnyRunConfig


def check_fp8(
    config: AnyRunConfig, backend: Backend, strategy_type: type[Strategy], target: TargetSpec
) -> None:
    """Raise ConfigError if the dtype, backend, strategy or target does not allow matrix products in fp8."""
    setting = f"train.fp8={config.train.fp8}"
    if config.train.dtype != "bfloat16":
        raise ConfigError(
            f"{setting} with train.dtype={config.train.dtype}: what is not in fp8 is in bfloat16; set "
            "train.dtype=bfloat16 or remove train.fp8"
        )
    if not backend.capabilities().fp8:
        raise ConfigError(f"{setting}: backend {config.backend.name!r} has no fp8 products here; remove it")
    if not strategy_type.takes_fp8:
        raise ConfigError(f"{setting}: strategy {config.strategy.name!r} does not compute in fp8; remove it")
    sizes = {"tokens in its vocabulary": target.vocab_size, "channels": target.hidden_size}
    for what, size in sizes.items():
        if size % FP8_MULTIPLE:
            raise ConfigError(
                f"{setting}: target {target.folder} has {size} {what}, not a multiple of {FP8_MULTIPLE}; remove it"
            )
