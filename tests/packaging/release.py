"""Builds every distribution into a folder and checks it as users will meet it: ``python -m tests.packaging.release``.

Each distribution is built as an sdist, and its wheel from that sdist. All have one version, metadata that an index
accepts, a licence and ``py.typed``. Each is then installed alone, from the folder, into an environment that holds
nothing but what its metadata requires, and every module of it is imported there. At last all are installed together,
and a tiny draft is trained and exported. Exits with 1 where a check fails.
"""

import argparse
import email
import json
import sys
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from .environments import applies, make_environment, required_of_others, run

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys
package, *optional = sys.argv[1:]
root = importlib.import_module(package)
for module in pkgutil.walk_packages(root.__path__, package + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing = error.name.partition(".")[0].replace("_", "-")
        if not any(name.startswith(missing) for name in optional):
            sys.exit(f"{module.name} needs {error.name}, which no requirement brings")
"""
"""Imports every module of a package. One that needs a distribution of an extra, or of a vendor, may be missing."""
FIELDS = ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type")
"""Metadata that every distribution has."""
OF_VENDORS = ["triton", "torch-npu"]
"""Brought by a vendor's build of torch, never required by name."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for sdists and wheels")
    parser.add_argument("--version", help="the version that all must have, such as that of a tag")
    asked = parser.parse_args()
    members = sorted(file.parent for file in ROOT.glob("*/*/pyproject.toml"))
    try:
        version = check_versions(members, asked.version)
        wheels = build(members, asked.output, version)
        with tempfile.TemporaryDirectory() as folder:
            for name in wheels:
                check_alone(name, wheels, asked.output, Path(folder) / name)
                print(f"{name} {version}: installed alone, every module imported", flush=True)
            check_together(wheels, asked.output, Path(folder) / "together")
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{len(wheels)} distributions of version {version} in {asked.output}: a draft was trained with them"
    )
    return 0


def check_versions(members: list[Path], wanted: str | None) -> str:
    """Return the version of all members."""
    projects = [tomllib.loads((member / "pyproject.toml").read_text())["project"] for member in members]
    versions = {project["version"] for project in projects}
    assert len(versions) == 1, f"the distributions have different versions: {sorted(versions)}"
    (version,) = versions
    assert wanted in (None, version), (
        f"the distributions have version {version}, the release is to be {wanted}"
    )
    return version


def build(members: list[Path], output: Path, version: str) -> dict[str, Path]:
    """Build sdists and, from them, wheels; return the wheels by the names of their distributions."""
    output.mkdir(exist_ok=True)
    earlier = sorted(output.glob("spec_*"))
    assert not earlier, f"{output} holds an earlier build, such as {earlier[0].name}: remove it first"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", output]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(run, *command), members))
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(output.iterdir()))
    wheels = {file.name.split("-")[0].replace("_", "-"): file for file in sorted(output.glob("*.whl"))}
    assert len(wheels) == len(members) == len(list(output.glob(f"*-{version}.tar.gz"))), sorted(wheels)
    for name in wheels:
        check_wheel(name, wheels, version)
    return wheels


def check_wheel(name: str, wheels: dict[str, Path], version: str) -> None:
    """Check what a wheel holds and says of itself; a requirement on another one of ours accepts this version."""
    files = zipfile.ZipFile(wheels[name]).namelist()
    assert f"{name.replace('-', '_')}/py.typed" in files, f"{name} holds no py.typed"
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files), f"{name} has no licence"
    fields = metadata(wheels[name])
    missing = [field for field in FIELDS if not fields[field]]
    assert not missing, f"the metadata of {name} lack {', '.join(missing)}"
    required = map(Requirement, fields.get_all("Requires-Dist") or [])
    wrong = [str(other) for other in required if other.name in wheels and version not in other.specifier]
    assert not wrong, f"{name} {version} requires {', '.join(wrong)}: this release has version {version}"


def check_alone(name: str, wheels: dict[str, Path], output: Path, folder: Path) -> None:
    """Install one distribution with what its metadata requires, and import all of its modules."""
    needed = requirements(name, wheels)
    python = make_environment(folder, required_of_others(needed))
    install(python, output, name)
    lines = [line for line in metadata(wheels[name]).get_all("Requires-Dist") or [] if "extra ==" in line]
    extras = {Requirement(line).name for line in lines}
    named_otherwise = [module for module, owners in packages_distributions().items() if extras & {*owners}]
    run(python, "-c", IMPORT_ALL, name.replace("-", "_"), *extras, *named_otherwise, *OF_VENDORS, cwd=folder)


def requirements(name: str, wheels: dict[str, Path]) -> list[str]:
    """Return the requirements of a distribution, and of ours that it requires with the extras that it names."""
    found: list[str] = []
    waiting, seen = [(name, "")], set()
    while waiting:
        one, extra = waiting.pop()
        if (one, extra) in seen:
            continue
        seen.add((one, extra))
        for required in map(Requirement, metadata(wheels[one]).get_all("Requires-Dist") or []):
            if applies(required, extra):
                required.marker = None
                found.append(str(required))
                if required.name in wheels:
                    waiting += [(required.name, chosen) for chosen in ("", *required.extras)]
    return found


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (file for file in archive.namelist() if file.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def install(python: Path, output: Path, *names: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    run(*pip, "--find-links", output, *names)


def check_together(wheels: dict[str, Path], output: Path, folder: Path) -> None:
    """Install all distributions in one environment; train and export a draft there."""
    needed = [line for name in wheels for line in requirements(name, wheels)]
    python = make_environment(folder, required_of_others(needed))
    install(python, output, *wheels)
    command = python.parent / "spec-trainer"
    plugins = json.loads(run(command, "plugins", "--json", cwd=folder))
    broken = [plugin["name"] for plugin in plugins if plugin["status"] not in ("ok", "unavailable")]
    assert not broken, f"plugins do not load: {broken}"
    target, data = folder / "target", folder / "rows.jsonl"
    run(python, "-c", TINY_TARGET, target, cwd=folder)
    rows = [{"input_ids": [(7 * row + token) % 97 for token in range(40)]} for row in range(16)]
    data.write_text("".join(json.dumps({**row, "loss_mask": [1] * 40}) + "\n" for row in rows))
    words = ["--target", target, "--data", data, "--output", folder / "run"]
    run(command, *words, "train.steps=2", cwd=folder)
    assert (folder / "run" / "draft" / "model.safetensors").exists(), "the run exported no draft"


TINY_TARGET = """
import sys, torch, transformers
config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=8,
                                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


if __name__ == "__main__":
    sys.exit(main())
