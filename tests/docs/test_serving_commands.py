"""The servers that pages start draft as the engines' plugins make their own programs draft."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from spec_core import Draft, plugins
from spec_engine_sglang.serving_format import speculative_arguments
from spec_engine_vllm.serving_format import speculative_config
from spec_kit.hosting import SpeculativeMode

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/serve.md", "docs/weight-sync.md")
CHAIN = 3
"""Number of draft tokens on the pages for a draft without a block."""
COUNTERS = ROOT / "packages/engine-vllm/src/spec_engine_vllm/acceptance_counts.py"
BLOCKS = {"eagle3": None, "dflash": 16, "dspark": 7}
"""Drafts that are trained here -> their default block sizes."""
ARCHITECTURES = {16: "DFlashDraftModel", 7: "Qwen3DSparkModel"}
"""Block size -> the architecture in the folder that is served."""
GUESSES = {None: CHAIN, 16: 15, 7: 7}
"""Block size -> draft tokens of a round: the first slot of a DSpark block guesses too."""


def drafts(program: str) -> dict[str, int | None]:
    """Return the block sizes by the program's names of the methods."""
    return {plugins.load(Draft, name).serving_methods[program]: block for name, block in BLOCKS.items()}


def servers(program: str, flag: str) -> list[tuple[dict[str, str], int | None]]:
    """Return the speculative arguments of each command that starts ``program`` with such a draft, and its block."""
    known, found = drafts(program), []
    for page in PAGES:
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for line in "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines():
            if program in line and flag in line:
                given = arguments(shlex.split(line))
                method = given.get("method") or given["speculative_algorithm"]
                if method in known:
                    found.append((given, known[method]))
    return found


def arguments(words: list[str]) -> dict[str, str]:
    """Return the flags of a command that are about speculation, by the names of their Python arguments."""
    pairs = itertools.pairwise(words)
    given = {flag[2:].replace("-", "_"): value for flag, value in pairs if flag.startswith("--speculative")}
    return json.loads(given["speculative_config"]) if "speculative_config" in given else given


VLLM = servers("vllm", "--speculative-config")
SGLANG = servers("sglang", "--speculative-algorithm")


IN_ONE_PASS = [given for given, _ in VLLM if "parallel_drafting" in given]
"""Commands for a chain whose tokens are guessed together, which any number of them may be."""


@pytest.mark.parametrize(("given", "block"), [pair for pair in VLLM if pair[0] not in IN_ONE_PASS])
def test_vllm_drafts_as_many_tokens_as_the_draft_has_slots(given, block):
    assert given.keys() == {"method", "model", "num_speculative_tokens"}
    assert given["num_speculative_tokens"] == GUESSES[block]


@pytest.mark.parametrize("given", IN_ONE_PASS)
def test_vllm_guesses_a_chain_at_once_as_its_plugin_makes_it(given, tmp_path):
    draft = plugins.load(Draft, "peagle")
    fields = {"architectures": [draft.architecture], "pard_token": 0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    mode = SpeculativeMode(
        folder=tmp_path,
        method=draft.serving_methods["vllm"],
        num_draft_tokens=given["num_speculative_tokens"],
        load=0,
    )
    assert speculative_config(mode) == given | {"model": str(tmp_path)}


@pytest.mark.parametrize(("given", "block"), SGLANG)
def test_sglang_drafts_with_the_arguments_of_its_plugin(given, block, tmp_path):
    fields = {"architectures": [ARCHITECTURES[block]], "block_size": block} if block else {}
    fields |= {"dflash_config": {"block_size": block}} if block == BLOCKS["dflash"] else {}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = speculative_arguments(
        SpeculativeMode(
            folder=tmp_path, method=given["speculative_algorithm"], num_draft_tokens=GUESSES[block], load=0
        )
    )
    ours["speculative_draft_model_path"] = given["speculative_draft_model_path"]
    assert given.items() <= {key: str(value) for key, value in ours.items()}.items()


def test_the_pages_start_both_programs_with_each_draft():
    assert IN_ONE_PASS
    assert {given["method"] for given, _ in VLLM} == set(drafts("vllm"))
    assert {given["speculative_algorithm"] for given, _ in SGLANG} == set(drafts("sglang"))


def test_the_counters_on_the_page_are_those_that_the_engine_reads():
    source = COUNTERS.read_text()
    (prefix,) = re.findall(r'"(vllm:spec_decode_num_)"', source)
    named = set(re.findall(rf"{prefix}(\w+)_total", (ROOT / "docs/serve.md").read_text()))
    assert named == {"drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"}
    assert {name for name in named if f'"{name}"' not in source} == set()
