"""Commands of servers that change the number of draft tokens with their load, and why others keep one."""

import json
import shlex

import pytest

from spec_core import Draft, plugins
from spec_trainer.run.serving import commands_by_load

from .edited_exports import TargetFolder

BY_LOAD = {1: 5, 6: 3, 20: 0}


pytestmark = pytest.mark.usefixtures("accepted")


def asked(folder, name, able=("llamacpp", "sglang", "vllm"), **fields):
    plugin = plugins.load(Draft, name)
    (folder / "config.json").write_text(json.dumps(fields))
    serve = dict.fromkeys(able, "a command with one number")
    return commands_by_load(TargetFolder, plugin(plugin.Config(name=name)), folder, BY_LOAD, serve)


def speculation(command: str) -> dict:
    return json.loads(shlex.split(command)[-1])


@pytest.mark.parametrize("versions", [{"vllm": "0.26.0"}, {"vllm": "0.33.0"}, {}])
def test_vllm_takes_a_number_for_each_range_of_loads(tmp_path, installed, versions):
    installed(**versions)
    commands, refused = asked(tmp_path, "eagle3")
    assert refused == {}
    assert speculation(commands["vllm"]) == {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 5, 5], [6, 19, 3], [20, 4096, 0]],
    }


def test_sglang_reads_a_file_that_its_command_writes_beside_the_draft(tmp_path):
    commands, _ = asked(tmp_path, "eagle3")
    write, start = commands["sglang"].split(" && ")
    *printed, into, file = shlex.split(write)
    assert (printed[:2], into, file) == (["printf", "%s"], ">", f"{tmp_path}.adaptive.json")
    assert json.loads(printed[2]) == {
        "1": {"candidate_steps": [5]}, "6": {"candidate_steps": [3]}, "20": {"candidate_steps": [0]},
    }  # fmt: skip
    words = shlex.split(start)
    assert words[-3:] == ["--speculative-adaptive", "--speculative-adaptive-config", file]
    assert words[words.index("--speculative-num-steps") + 1] == "5", "one of the numbers in the file"


DSPARK = {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"block_size": 7}}


@pytest.mark.parametrize(
    ("versions", "confidence", "adaptive"),
    [
        ({"vllm": "0.26.0"}, True, False),
        ({"vllm": "0.28.0"}, True, True),
        ({"vllm": "0.29.1"}, False, False),
        ({"vllm": "0.30.0"}, False, True),
        ({}, True, True),
    ],
)
def test_vllm_verifies_a_dspark_block_adaptively_from_the_version_on_that_can(
    tmp_path, installed, versions, confidence, adaptive
):
    installed(**versions)
    commands, refused = asked(tmp_path, "dspark", enable_confidence_head=confidence, **DSPARK)
    given = speculation(commands["vllm"])
    assert given["num_speculative_tokens"] == 5
    assert given.get("enable_adaptive_verification", False) is adaptive
    assert ("num_speculative_tokens_per_batch_size" in given) is not adaptive
    assert refused == {
        "llamacpp": "its program has one number of draft tokens for every load",
        "sglang": "SGLang adapts the number of draft tokens with Eagle3 and MTP alone",
    }


def test_a_round_of_p_eagle_has_one_number(tmp_path):
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 0}
    assert asked(tmp_path, "peagle", **fields) == (
        {},
        {"vllm": "vLLM lays out the rounds of P-EAGLE for one number of draft tokens"},
    )


def test_an_engine_that_cannot_serve_the_draft_gives_no_reason(tmp_path):
    commands, refused = asked(tmp_path, "dspark", able=["vllm"], **DSPARK)
    assert (list(commands), refused) == (["vllm"], {})
