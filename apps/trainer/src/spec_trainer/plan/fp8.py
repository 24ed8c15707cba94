"""Check whether the target's sizes allow products in 8-bit floating point (``train.fp8``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_kit.drafting.decoder_shape import FP8_MULTIPLE

if TYPE_CHECKING:
    from spec_core import TargetSpec
    from spec_trainer.configuration.run import AnyRunConfig


def check_fp8(config: AnyRunConfig, target: TargetSpec) -> None:
    """Raise ConfigError if the sizes of the target do not allow matrix products in fp8."""
    sizes = {"tokens in its vocabulary": target.vocab_size, "channels": target.hidden_size}
    for what, size in sizes.items():
        if size % FP8_MULTIPLE:
            raise ConfigError(
                f"train.fp8={config.train.fp8}: target {target.folder} has {size} {what}, not a multiple of "
                f"{FP8_MULTIPLE}; remove it"
            )
