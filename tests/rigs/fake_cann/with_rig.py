"""Runs a command on the rig: ``python tests/rigs/fake_cann/with_rig.py COMMAND [ARGUMENT …]``.

Builds the stand-in CANN for the torch_npu of the Python that runs this, and replaces itself by the command.
"""

import os
import sys
from pathlib import Path

from build import build

HERE = Path(__file__).resolve().parent


def environment(libraries: Path) -> dict[str, str]:
    """Return the environment in which the genuine torch_npu loads and computes."""
    paths = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": HERE / "python"}
    joined = {
        name: os.pathsep.join(filter(None, [str(path), os.environ.get(name)])) for name, path in paths.items()
    }
    home = libraries / "home"
    cann = {"ASCEND_HOME_PATH": str(home), "ASCEND_OPP_PATH": str(home / "opp")}
    return {**os.environ, **joined, **cann, "FAKE_CANN": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    built = build(HERE / "built")
    os.execvpe(sys.argv[1], sys.argv[1:], environment(built))
