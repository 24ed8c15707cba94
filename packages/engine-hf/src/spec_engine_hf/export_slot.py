"""ExportSlot holds the exported draft that engine ``hf`` serves, and the spare that replaces it.

An update loads fresh weights into the spare copy. Then the spare copy becomes the served draft.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from spec_engine_hf.decoding import DraftSource
from spec_kit.drafting import read_config
from spec_kit.weight_sync import DraftLayout, DraftSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from spec_engine_hf.hf_model import HfModel


class ExportSlot(DraftSlot):
    """A slot whose two copies of the draft, live and spare, are separate modules.

    The same code loads an update and an exported folder.
    """

    def __init__(
        self, live: DraftSource, folder: Path, model: HfModel, serve: Callable[[DraftSource], None]
    ) -> None:
        """Hold ``live``, the served draft, which was loaded from ``folder``.

        ``serve(draft)`` makes the engine use ``draft`` for every sequence that begins afterwards.
        """
        self._copies = {"live": live, "spare": live}
        self._config = read_config(folder)
        self._layout = DraftLayout.of_folder(folder, model.target)
        self._model = model
        self._serve = serve

    @property
    def device(self) -> torch.device:
        """Return the CPU, because the received tensors are written to a folder."""
        return torch.device("cpu")

    def layout(self) -> DraftLayout:
        """Return the names, shapes and dtypes that an update must have."""
        return self._layout

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Build a module from the tensors, as if they had been exported into a folder."""
        with tempfile.TemporaryDirectory(prefix="draft-update-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self._config), encoding="utf-8")
            save_file({name: tensor.clone() for name, tensor in weights}, Path(folder) / "model.safetensors")
            self._copies["spare"] = DraftSource.of_export(Path(folder), self._model, self._copies["live"].ops)

    def swap(self) -> None:
        """Serve the spare copy, and keep the other copy as the spare; running sequences keep their draft."""
        self._copies = {"live": self._copies["spare"], "spare": self._copies["live"]}
        self._serve(self._copies["live"])
