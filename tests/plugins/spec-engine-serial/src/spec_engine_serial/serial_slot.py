"""SerialSlot: the draft that is served, and the one that takes its place."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from spec_engine_serial.decoding import LoadedDraft
from spec_kit.weight_sync import DraftLayout, DraftSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from spec_engine_serial.decoding import Target


class SerialSlot(DraftSlot):
    """Two networks, of which one is served; an update becomes the other by the code that loads a folder."""

    def __init__(
        self, live: LoadedDraft, folder: Path, target: Target, serve: Callable[[LoadedDraft], None]
    ) -> None:
        self._copies = {"live": live, "spare": live}
        self._folder, self._target, self._serve = folder, target, serve
        self._layout = DraftLayout.of_folder(folder, target.spec)

    @property
    def device(self) -> torch.device:
        """The CPU: the tensors of an update are written to a file."""
        return torch.device("cpu")

    def layout(self) -> DraftLayout:
        return self._layout

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """U2: touch the spare copy alone; a tensor is lent until the next one is asked for."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self._folder / "config.json", folder)
            save_file({name: tensor.clone() for name, tensor in weights}, Path(folder) / "model.safetensors")
            self._copies["spare"] = LoadedDraft.of_folder(
                Path(folder), self._target, self._copies["live"].ops
            )

    def swap(self) -> None:
        """U3: an answer under way ends with the draft that it began with. U9: counters begin anew."""
        self._copies = {"live": self._copies["spare"], "spare": self._copies["live"]}
        live = self._copies["live"]
        self._copies["live"] = LoadedDraft(live.draft, live.module, live.ops, live.layers)
        self._serve(self._copies["live"])
