"""Fresh environments in which the project's wheels are installed, with everything else lent from this one."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

LIMIT_S = 600


def run(*command: object, **options: object) -> str:
    """Return the output of a command that must succeed; otherwise its output is in the failure."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, **options)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def make_environment(folder: Path, lent: dict[str, Path]) -> Path:
    """Make an environment that holds links to the given entries of site-packages; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name, entry in lent.items():
        (site / name).symlink_to(entry)
    return python


def all_of_others() -> dict[str, Path]:
    """Return what is installed here, by name, but for our packages and for editable installs."""
    folders = [Path(folder) for folder in sys.path if Path(folder).name == "site-packages"]
    return {
        entry.name: entry
        for folder in reversed(folders)
        for entry in folder.iterdir()
        if entry.suffix != ".pth" and not entry.name.startswith(("spec_", "__pycache__", "__editable__"))
    }


def required_of_others(requirements: list[str]) -> dict[str, Path]:
    """Return the entries of site-packages that requirements bring: theirs, and those of what they require.

    A requirement on a distribution of ours is passed over. One that is not installed here is left out, so that pip
    says that it is missing.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.name.startswith("spec-") or not applies(requirement, extra):
            continue
        for chosen in ("", *requirement.extras):
            key = f"{requirement.name}[{chosen}]"
            distribution = _installed(requirement.name)
            if key in seen or distribution is None:
                continue
            seen.add(key)
            waiting += [(needed, chosen) for needed in distribution.requires or ()]
            found |= _entries(distribution)
    return found


def applies(requirement: Requirement, extra: str) -> bool:
    """Return whether a distribution, with its extra ``extra`` or none if it is empty, has the requirement."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entries(distribution: importlib.metadata.Distribution) -> dict[str, Path]:
    """Return the entries of site-packages that a distribution has installed; its scripts are not among them."""
    names = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    return {name: Path(str(distribution.locate_file(name))) for name in names if not name.endswith(".pth")}
