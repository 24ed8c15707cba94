"""Export a draft of fresh weights as ``spec-trainer follow`` does, before a server has to be there.

python benchmarks/follow_draft.py FOLDER '["target=DIR", "draft.name=eagle3", …]'     # words of the later command
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_trainer.cli.commands.follow import resolve_follow
from spec_trainer.live.cycles import first_weights
from spec_trainer.run.draft_trainer import export_draft


def main() -> None:
    """Write the folder that the command line names."""
    folder, words = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ.setdefault(DRAFT_TOKEN_VARIABLE, "none")
    spec = resolve_follow(None, {"follow.servers": ["http://127.0.0.1:1"]}, words)
    export_draft(spec.draft, first_weights(spec), spec.target, folder, spec.config.data)


if __name__ == "__main__":
    main()
