"""Write a draft with the matrices of its layers in 8 bits, for the command ``export``."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from spec_core import Draft, TargetSpec
from spec_core.errors import ConfigError
from spec_kit.drafting import ServedDraft, recognise
from spec_kit.drafting.quantised_draft import QUANTISED_DTYPES, quantise_folder
from spec_trainer.base.disk import follow_umask, not_written, scratch_beside
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.configuration.chat import ChatConfig
from spec_trainer.measure.evaluation.measure import decode_once_with
from spec_trainer.measure.evaluation.prepare import prepare
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.serving import refusals
from spec_trainer.training.wiring import create_engine

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantisation:
    """The dtype of the matrices, and a file of prompts by which the acceptance length is measured, or None."""

    dtype: str
    prompts: Path | None

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown dtype."""
        if self.dtype not in QUANTISED_DTYPES:
            raise ConfigError(
                f"--dtype={self.dtype}: expected {' or '.join(QUANTISED_DTYPES)}, or none for the target's dtype"
            )

    def write(
        self, draft: Draft, weights: dict[str, Tensor], target: TargetSpec, output: Path, chat: ChatConfig
    ) -> dict[str, Any]:
        """Write the draft into ``output``; return figures, and ``notes`` that compare it with the original.

        Raise ConfigError if no engine with a plugin here loads it as it is; warn of each engine that does not.
        """
        if not isinstance(draft, ServedDraft) or not draft.quantised_modules:
            raise ConfigError(
                f"--dtype={self.dtype}: a draft {draft.name!r} has no layers that engines load in 8 bits"
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        with scratch_beside(output) as scratch:
            plain = scratch / "plain"
            quantised = scratch / output.name
            try:
                export_draft(draft, weights, target, plain, chat, named=output)
                shutil.copytree(plain, quantised)
                quantise_folder(quantised, draft.quantised_modules, self.dtype)
                for file in quantised.iterdir():
                    follow_umask(file)
                self._check(recognise(quantised, target), target, quantised)
                figures = self._report(plain, quantised, target)
                quantised.rename(output)
            except (OSError, SafetensorError) as error:
                raise not_written(f"draft {output}", output.parent, error) from error
        return figures

    def _check(self, draft: Draft, target: TargetSpec, folder: Path) -> None:
        refused = refusals(target, draft, folder)
        lines = [str(error).replace(f" {folder} ", " ") for error in refused.values()]
        if not draft.serving_methods.keys() - refused.keys():
            raise ConfigError(f"--dtype={self.dtype}: no engine loads it: {'; '.join(lines)}")
        for line in lines:
            log.warning("--dtype=%s: %s", self.dtype, line)

    def _report(self, plain: Path, quantised: Path, target: TargetSpec) -> dict[str, Any]:
        sizes = [(folder / "model.safetensors").stat().st_size / 2**20 for folder in (quantised, plain)]
        size = f"size: {sizes[0]:.2f} MiB, {sizes[1]:.2f} MiB without --dtype={self.dtype}"
        if self.prompts is None:
            return {"notes": [size, "acceptance length: not measured in 8 bits; --prompts FILE does it"]}
        request = EvaluationRequest(
            target=str(target.folder), draft_model=quantised, prompts=self.prompts, temperature=0.0
        )
        evaluation = prepare(request, ())
        options = evaluation.options
        with engine_output_kept(options.engine_type), create_engine(options, evaluation.target) as engine:
            after, before = (
                decode_once_with(
                    engine, folder, evaluation.work, f"the {kind} draft"
                ).counters.acceptance_length
                for folder, kind in ((quantised, "quantised"), (plain, "plain"))
            )
        without = f"{before:.3f} without --dtype={self.dtype}"
        tau = f"acceptance length in engine {options.engine_type.name}: {after:.3f}, {without}"
        return {"acceptance_length": after, "notes": [size, tau]}
