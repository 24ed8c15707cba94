"""Which version and build of an engine serves a folder that is whole."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from tests.unit.trainer.run.edited_exports import LATENT, OPTIONS, edit, merged

from spec_core import Draft, plugins
from spec_core.errors import ArtifactError, ConfigError, RunError
from spec_core.target import LatentSizes
from spec_draft_eagle3.draft import Eagle3Draft
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_engine_sglang.serving_format import check_sglang_folder
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_engine_vllm.serving_format import check_vllm_folder
from spec_kit.drafting import recognise
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.commands.evaluate import export_untrained
from spec_trainer.run.draft_trainer import export_draft


class _Unnamed(Eagle3Draft):
    serving_methods = {}  # noqa: RUF012


def test_mixed_layers_need_the_runner_that_the_cpu_build_lacks(export, target):
    folder = export("dflash, mixed")
    check_vllm_folder(folder, target)
    with pytest.raises(ArtifactError, match="mixes sliding-window and full-attention layers"):
        check_vllm_folder(folder, target, is_cpu_build=True)


def test_a_markov_head_needs_the_runner_that_the_cpu_build_lacks(export, target):
    folder = export("dspark")
    with pytest.raises(ArtifactError, match="needs vLLM's second model runner"):
        check_vllm_folder(folder, target, is_cpu_build=True)


def test_engines_say_before_there_is_a_folder_which_drafts_they_serve():
    plugin = plugins.load(Draft, "eagle3")
    one, two = (plugin(plugin.Config(name="eagle3", num_layers=layers)) for layers in (1, 2))
    for draft in (one, two):
        VllmEngine.check_method(VllmConfig(name="vllm"), draft)
    SglangEngine.check_method(SglangConfig(name="sglang"), one)
    with pytest.raises(ConfigError, match=r"engine.name=sglang: .*its serving_methods name vllm$"):
        SglangEngine.check_method(SglangConfig(name="sglang"), two)
    config = VllmConfig(name="vllm", draft_method="other")
    VllmEngine.check_method(config, _Unnamed(plugin.Config(name="eagle3")))
    with pytest.raises(ConfigError, match="name no engine"):
        VllmEngine.check_method(VllmConfig(name="vllm"), _Unnamed(plugin.Config(name="eagle3")))


def test_a_selector_needs_a_vllm_that_knows_it(export, target):
    folder = export("dflash2")
    with pytest.raises(ArtifactError, match=r"vLLM knows from 0\.28 on"):
        check_vllm_folder(folder, target, is_before_28=True)
    with pytest.raises(
        ArtifactError, match="chosen among candidates, which needs vLLM's second model runner"
    ):
        check_vllm_folder(folder, target, is_cpu_build=True)


def test_latent_attention_before_vllm_0_28(export, target):
    """Exports have no plain rotary embeddings; the build for CPUs had no such attention at all."""
    folder, latent = export("eagle3, mla"), replace(target, latent=LatentSizes(**LATENT))
    check_vllm_folder(folder, latent, is_before_28=True)
    with pytest.raises(ArtifactError, match=r"whose sizes vLLM before 0\.28 takes for the draft's"):
        check_vllm_folder(folder, target, is_before_28=True)
    with pytest.raises(ArtifactError, match=r"vLLM's CPU build has from 0\.28 on"):
        check_vllm_folder(folder, latent, is_cpu_build=True, is_before_28=True)
    edit(folder, {"rope_parameters": {"rope_type": "default"}, "rope_scaling": None})
    check_vllm_folder(folder, target)
    with pytest.raises(ArtifactError, match="takes for YaRN without a factor"):
        check_vllm_folder(folder, latent, is_before_28=True)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("qwen3_5_text", {}), ("qwen3_5_moe_text", {"num_experts": 4, "moe_intermediate_size": 16})],
    ids=["dense", "experts"],
)
def test_vllm_0_26_knows_no_text_model_of_qwen3_5(kind, sizes, make_target, tmp_path):
    target = read_target(make_target(kind, **sizes))
    plugin = plugins.load(Draft, "mtp")
    folder = export_untrained(plugin(plugin.Config(name="mtp")), target, tmp_path / "draft")
    check_vllm_folder(folder, target)
    with pytest.raises(ArtifactError, match=r"Qwen3_5MoeForCausalLM, which vLLM 0\.26 does not know"):
        check_vllm_folder(folder, target, is_before_28=True)
    edit(folder, {"architectures": ["Qwen3_5ForConditionalGeneration"]})
    check_vllm_folder(folder, target, is_before_28=True)


def test_latent_attention_in_vllms_build_for_cpus(export, target):
    """The target has it too, and the cache has the one width that the kernel is compiled for."""
    folder = export("eagle3, mla")
    with pytest.raises(ArtifactError, match="share no size of cache blocks"):
        check_vllm_folder(folder, target, is_cpu_build=True)
    sizes = LatentSizes(**LATENT)
    latent = replace(target, latent=sizes)
    with pytest.raises(ArtifactError, match="kv_lora_rank=512 and qk_rope_head_dim=64 alone"):
        check_vllm_folder(folder, latent, is_cpu_build=True)
    edit(folder, {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    check_vllm_folder(folder, latent, is_cpu_build=True)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_an_export_with_a_head_that_vllm_lacks_is_kept_for_sglang(target, tmp_path, head):
    plugin = plugins.load(Draft, "dspark")
    draft = plugin(plugin.Config(name="dspark", markov_head=head, **OPTIONS["dspark"]))
    folder = export_untrained(draft, target, tmp_path / "draft")
    assert set(draft.serving_methods) == set(recognise(folder, target).serving_methods) == {"sglang"}
    check_sglang_folder(folder, target)
    with pytest.raises(ArtifactError, match="markov_head_type is not vanilla"):
        check_vllm_folder(folder, target)


@pytest.mark.parametrize("check", [check_vllm_folder, check_sglang_folder], ids=["vllm", "sglang"])
@pytest.mark.parametrize("architecture", ["Other", "LlamaForCausalLM"])
def test_an_architecture_that_an_engine_does_not_know_is_passed_on(export, target, check, architecture):
    """Also a whole Llama's, whose tensors have the prefix that an Eagle3 draft's must not have."""
    folder = export("eagle3")
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    edit(folder, {"architectures": [architecture], "draft_vocab_size": None})
    check(folder, target)


@pytest.mark.parametrize("flaw", ["not recognised", "another shape", "one engine only"])
def test_export_that_cannot_be_read_back_is_not_kept(target, tmp_path, monkeypatch, flaw):
    """The fault of a plugin, not of the person: the run fails, and the folder that was there stays."""
    plugin = plugins.load(Draft, "eagle3")
    draft, folder = plugin(plugin.Config(name="eagle3")), tmp_path / "draft"
    export_untrained(draft, target, folder)
    before = (folder / "config.json").read_bytes()
    changes = {
        "not recognised": {"architectures": ["SomethingElse"]},
        "another shape": {"intermediate_size": 3},
        "one engine only": {"draft_vocab_size": None},
    }[flaw]
    fields = draft.exported_config(target)
    monkeypatch.setattr(plugin, "exported_config", lambda self, target: merged(fields, changes))
    weights = load_file(folder / "model.safetensors")
    with pytest.raises(RunError, match="the eagle3 draft was exported and fails the check"):
        export_draft(draft, weights, target, folder)
    assert (folder / "config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("other", ["pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_in_another_file_are_named_with_the_remedy(export, target, other):
    folder = export("eagle3")
    (folder / "model.safetensors").rename(folder / other)
    with pytest.raises(ArtifactError, match=f"has {other} in place of model.safetensors: "):
        recognise(folder, target)
