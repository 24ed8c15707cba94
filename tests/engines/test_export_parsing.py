"""The installed engines' own parsers read our exports: no engine is started, no weight is loaded."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from spec_core import Draft, plugins
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.drafting import recognise
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.commands.evaluate import export_untrained

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("states")]

VLLM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal, _resolve_layer_attention
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

NORMS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")

def read(target, folder, method):
    speculative = {"method": method, "model": folder, "num_speculative_tokens": 3}
    if method == "speculators":  # a folder that names its target
        target, speculative = folder, None
    args = EngineArgs(model=target, skip_tokenizer_init=True, dtype="float32", max_model_len=128,
                      enforce_eager=True, speculative_config=speculative)
    try:
        spec = args.create_engine_config().speculative_config
    except ValueError as error:
        return {"refused": str(error)}
    model, fields = spec.draft_model_config, spec.draft_model_config.hf_config
    served = {"target": args.model, "draft": spec.model, "tokens": spec.num_speculative_tokens, "method": spec.method}
    found = {
        "served": served,
        "class": model.registry.resolve_model_cls(model.architectures, model)[0].__name__,
        "layers": get_eagle3_aux_layers_from_config(spec),
        "vocab": [fields.vocab_size, getattr(fields, "draft_vocab_size", None)],
        "heads": [fields.num_attention_heads, fields.num_key_value_heads, fields.head_dim],
        "rope": fields.rope_parameters,
        "eps": fields.rms_norm_eps,
        "options": [getattr(fields, name, None) for name in NORMS],
    }
    if spec.method == "dflash":
        layers = range(fields.num_hidden_layers)
        mixed = len(set(fields.layer_types)) > 1  # resolved inside a running engine only
        found |= {
            "causal": [_dflash_layer_causal(fields, index) for index in layers],
            "windows": None if mixed else [_resolve_layer_attention(fields, index)[0] for index in layers],
            "mask": fields.dflash_config["mask_token_id"],
        }
    return found

target, *drafts = sys.argv[1:]
results = {folder: read(target, folder, method) for folder, method in (word.split("=") for word in drafts)}
print("RESULT", json.dumps(results))
"""

SGLANG = """
import json, sys
from sglang.srt.speculative.dflash_utils import get_dflash_attention_sliding_window_size, parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang.srt.models.dflash import _get_dflash_layer_attention_params

def read(folder, method):
    fields = get_config(folder, trust_remote_code=False)
    if method == "eagle3":
        return {"layers": [layer + 1 for layer in fields.eagle_config["eagle_aux_hidden_state_layer_ids"]],
                "vocab": [fields.vocab_size, fields.draft_vocab_size],
                "options": [fields.fc_norm, fields.norm_output, fields.norm_before_residual]}
    draft = parse_dflash_draft_config(draft_hf_config=fields)
    params = [_get_dflash_layer_attention_params(fields, index) for index in range(draft.num_hidden_layers)]
    return {"layers": [layer + 1 for layer in draft.target_layer_ids], "mask": draft.mask_token_id,
            "block": draft.block_size, "causal": [kind.name == "DECODER" for _, kind in params],
            "windows": [None if left < 0 else left + 1 for left, _ in params]}

target, *drafts = sys.argv[1:]
print("RESULT", json.dumps({f: read(f, m) for f, m in (word.split("=") for word in drafts)}))
"""

EXPORTS = {
    "eagle3": {"fc_norm": False, "norm_output": False},
    "eagle3, reduced": {"vocab_size": 40},
    "eagle3, options": {
        "vocab_size": 40, "layers": (1, 3, 5, 7), "fc_norm": True, "norm_output": True, "num_heads": 8,
        "num_kv_heads": 8,
    },
    "eagle3, published": {
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "qk_norm": True,
    },
    "dflash": {"block_size": 4, "num_layers": 2, "num_features": 3, "mask_token_id": 90},
    "dflash, sliding": {
        "block_size": 4, "num_layers": 2, "sliding_window": 8, "mask_token_id": 90, "layers": (1, 7),
    },
    "dflash, reduced": {
        "block_size": 4, "num_layers": 2, "num_features": 3, "mask_token_id": 90, "vocab_size": 40,
    },
    "dflash, mixed": {
        "block_size": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 8,
        "mask_token_id": 90,
        "layers": (1, 7),
    },
}  # fmt: skip
LAYERS = {
    "eagle3": [2, 4, 5], "eagle3, reduced": [2, 4, 5], "eagle3, options": [1, 3, 5, 7],
    "eagle3, published": [2, 4, 5], "dflash": [2, 4, 6], "dflash, reduced": [2, 4, 6],
    "dflash, sliding": [1, 7], "dflash, mixed": [1, 7],
}  # fmt: skip
CAUSAL = {"dflash": [False, False], "dflash, sliding": [True, True], "dflash, mixed": [True, False]}
WINDOWS = {"dflash": [None, None], "dflash, sliding": [8, 8], "dflash, mixed": [8, None]}
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def target(make_target):
    return make_target("llama", head_dim=32, hidden_size=64, rope_parameters=ROPE)


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    """An export for every entry of EXPORTS."""
    spec, made = read_target(target), {}
    for case, options in EXPORTS.items():
        plugin = plugins.load(Draft, case.partition(",")[0])
        torch.manual_seed(0)
        draft = plugin(plugin.Config(name=plugin.name, **options))
        made[case] = export_untrained(draft, spec, tmp_path_factory.mktemp("export") / "draft")
    return made


def parsed(script, target, folders):
    """Return what each case was parsed to, by a process of its own: engines configure much when they are imported."""
    words = [f"{folder}={case.partition(',')[0]}" for case, folder in folders.items()]
    child = subprocess.run(
        [sys.executable, "-c", script, str(target), *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    (line,) = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    results = json.loads(line.removeprefix("RESULT "))
    return {case: results[str(folder)] for case, folder in folders.items()}


def old_runner(found):
    """vLLM on a processor has a model runner that takes no mixed layers; it says so when it is configured."""
    return "mixed sliding/full" in found.get("refused", "")


@pytest.fixture(scope="module")
def named(target, folders, tmp_path_factory):
    """The exports in the layout of speculators, which names their target; it has no place for mixed layers."""
    spec, made = read_target(target), {}
    for case in folders.keys() - {"dflash, mixed"}:
        made[f"speculators, {case}"] = folder = tmp_path_factory.mktemp("speculators") / "draft"
        draft = recognise(folders[case], spec)
        VllmEngine.serving.write(VllmConfig(name="vllm"), spec, draft, folders[case], folder)
    return made


@pytest.fixture(scope="module")
def by_vllm(target, folders, named):
    if not VllmEngine.probe().versions:
        pytest.skip("vLLM is not installed")
    return parsed(VLLM, target, folders | named)


@pytest.fixture(scope="module")
def vllm(by_vllm, folders):
    mixed = by_vllm["dflash, mixed"]
    results = {case: by_vllm[case] for case in folders}
    return {case: found for case, found in results.items() if found is not mixed or not old_runner(mixed)}


@pytest.fixture(scope="module")
def sglang(target, folders, request):
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pytest.skip("SGLang is not installed")
    request.getfixturevalue("sglang_environment")
    return parsed(SGLANG, target, folders)


def test_vllm_finds_the_same_in_a_folder_that_names_its_target(target, by_vllm, named):
    """Beside the same draft: the target, and a number of draft tokens. The vocabulary has its size in any case."""
    for case, folder in named.items():
        theirs, ours = by_vllm[case], by_vllm[case.removeprefix("speculators, ")]
        method, tokens = ("eagle3", 4) if "eagle3" in case else ("dflash", 3)
        assert theirs["served"] == {
            "target": str(target), "draft": str(folder), "tokens": tokens, "method": method,
        }  # fmt: skip
        assert theirs["vocab"] in (ours["vocab"], [97, 97])
        left = theirs.keys() - {"served", "vocab"}
        assert {key: theirs[key] for key in left} == {key: ours[key] for key in left}


def test_vllm_taps_the_captured_layers(vllm):
    assert {case: found["layers"] for case, found in vllm.items()} == {case: LAYERS[case] for case in vllm}
    assert LAYERS.keys() - vllm.keys() <= {"dflash, mixed"}


def test_vllm_finds_the_model_class_and_its_options(vllm):
    for case, found in vllm.items():
        chain = "Eagle3Qwen3ForCausalLM" if "published" in case else "Eagle3LlamaForCausalLM"
        assert found["class"] == (chain if case.startswith("eagle3") else "DFlashQwen3ForCausalLM")
        assert found["eps"] == 1e-6
        assert found["heads"] == ([8, 8, 32] if "options" in case else [4, 2, 32])
        assert {key: found["rope"][key] for key in ROPE} == ROPE
    assert [vllm[case]["vocab"] for case in ("eagle3", "eagle3, reduced")] == [[97, 97], [97, 40]]
    assert [vllm[case]["vocab"] for case in ("dflash", "dflash, reduced")] == [[97, None], [97, 40]]
    assert vllm["eagle3"]["options"] == [False] * 4
    assert vllm["eagle3, options"]["options"] == [True, True, False, False]
    assert vllm["eagle3, published"]["options"] == [False, False, True, True]


def test_vllm_serves_blocks_as_they_were_trained(vllm):
    for case in CAUSAL.keys() & vllm.keys():
        assert vllm[case]["causal"] == CAUSAL[case], case
        assert vllm[case]["mask"] == 90
        assert vllm[case]["windows"] in (WINDOWS[case], None)


def test_sglang_reads_the_same(sglang):
    assert {case: found["layers"] for case, found in sglang.items()} == LAYERS
    for case, causal in CAUSAL.items():
        found = sglang[case]
        assert (found["causal"], found["windows"]) == (causal, WINDOWS[case]), case
        assert (found["mask"], found["block"]) == (90, 4)
    assert [sglang[case]["vocab"] for case in ("eagle3", "eagle3, reduced")] == [[97, 97], [97, 40]]
    assert sglang["eagle3, options"]["options"] == [True, True, False]
