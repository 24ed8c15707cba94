"""Folders that are whole, and that one engine would still refuse or read in another way."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.trainer.run.edited_exports import OPTIONS, SMALL_SELECTOR, edit

from spec_core import Draft, plugins
from spec_core.errors import ArtifactError
from spec_engine_llamacpp.serving_format import check_llamacpp_export
from spec_engine_sglang.serving import warn_once
from spec_engine_sglang.serving_format import check_sglang_folder
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_engine_vllm.serving_format import check_vllm_folder
from spec_kit.drafting import recognise
from spec_kit.drafting.quantised_draft import quantise_folder
from spec_trainer.cli.commands.evaluate import export_untrained
from spec_trainer.run.draft_folder import check_draft, position_warning
from spec_trainer.run.serving import serving_commands

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle3", {"layers": (1, 2, 3), "num_layers": 2}), ("peagle", {"layers": (1, 4), "num_layers": 1})],
)
def test_an_untrained_draft_has_the_shape_of_the_trained_one_and_other_weights(
    target, tmp_path, name, options
):
    plugin = plugins.load(Draft, name)
    trained = export_untrained(plugin(plugin.Config(name=name, **options)), target, tmp_path / "trained")
    untrained = export_untrained(plugin.from_folder(trained), target, tmp_path / "untrained")
    assert (untrained / "config.json").read_text() == (trained / "config.json").read_text()
    first, second = (load_file(folder / "model.safetensors") for folder in (trained, untrained))
    assert first.keys() == second.keys()
    drawn = [name for name, tensor in first.items() if tensor.dim() > 1]
    assert drawn
    assert not any(torch.equal(first[name], second[name]) for name in drawn)


@pytest.mark.parametrize("case", sorted(case for case in OPTIONS if not case.endswith("reduced")))
def test_exports_are_read_alike_by_both(export, target, case):
    folder = export(case)
    check_vllm_folder(folder, target)
    check_sglang_folder(folder, target)


@pytest.mark.parametrize(
    ("name", "options", "guesses"),
    [
        ("eagle3", {"num_steps": 3}, 3),
        ("eagle3", {"num_steps": 7}, 4),
        ("peagle", {"num_guesses": 7, "num_layers": 1}, 7),
        ("dflash", {"block_size": 8, "num_layers": 1}, 7),
        ("dflash2", {"block_size": 4, "num_layers": 1, **SMALL_SELECTOR}, 3),
        ("dspark", {"block_size": 3, "num_layers": 1, "markov_rank": 8}, 3),
    ],
)
def test_a_draft_is_served_with_no_more_guesses_than_it_was_trained_for(
    target, tmp_path, name, options, guesses
):
    plugin = plugins.load(Draft, name)
    draft = plugin(plugin.Config(name=name, **options))
    folder = export_untrained(draft, target, tmp_path / "draft")
    assert draft.default_draft_tokens == guesses
    assert check_draft(folder, target, None)[1] == guesses
    commands = serving_commands(target, draft, folder, draft.default_draft_tokens)
    assert f'"num_speculative_tokens": {guesses}' in commands["vllm"]


def test_draft_with_fewer_positions_than_its_target_is_named(export, target):
    folder = export("eagle3")
    assert position_warning(check_draft(folder, target, None)[0], target) is None
    edit(folder, {"max_position_embeddings": 64})
    warning = position_warning(check_draft(folder, target, None)[0], target)
    assert warning.startswith(f"the draft has 64 positions, target {target.folder} has 256")
    assert "max_position_embeddings=256" in warning


def test_a_folder_without_a_number_of_steps_is_served_with_four_guesses(export, target):
    folder = export("eagle3")
    edit(folder, {"num_steps": None})
    assert check_draft(folder, target, None)[1] == 4


FLAWS = [
    (check_vllm_folder, "eagle3", {IDS: None}, "names its layers in eagle_config"),
    (check_vllm_folder, "eagle3", {IDS: None, "eagle_config": None, "aux_hidden_states_layer_ids": [1]}, "names its"),
    (check_vllm_folder, "eagle3, mla", {IDS: None}, "names its layers in eagle_config"),
    (check_vllm_folder, "eagle3, mla", {"model_type": "deepseek_v3"}, "its model_type is deepseek_v3"),
    (check_vllm_folder, "eagle3", {"image_embeddings": "merged"}, "vLLM gives it the placeholder's"),
    (check_sglang_folder, "eagle3, mla", {"num_hidden_layers": 2}, "latent attention in several layers"),
    (check_sglang_folder, "eagle3, mla", {"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, "SGLang does not know"),
    (check_sglang_folder, "eagle3, mla", {"draft_vocab_size": None}, "has no draft_vocab_size"),
    (check_vllm_folder, "dflash", {"dflash_config": {"mask_token_id": None}}, "no dflash_config.mask_token_id"),
    (check_vllm_folder, "dflash", {"dflash_config": {"target_layer_ids": None}}, "no dflash_config.target_layer_ids"),
    (check_vllm_folder, "dflash2", {"dflash_config": {"mask_token_id": None}}, "no dflash_config.mask_token_id"),
    (check_sglang_folder, "dflash2", {"num_target_layers": None}, "has no num_target_layers"),
    (check_vllm_folder, "dspark", {"dflash_config": {"mask_token_id": None}}, "no dflash_config.mask_token_id"),
    (check_vllm_folder, "dspark", {"dflash_config": {"target_layer_ids": None}}, "no dflash_config.target_layer_ids"),
    (check_vllm_folder, "dspark", {"markov_head_type": "gated"}, "markov_head_type is not vanilla"),
    (check_vllm_folder, "dspark", {"architectures": ["DSparkDraftModel"]}, "takes for a part of the target"),
    (check_vllm_folder, "peagle", {"pard_token": None}, "no pard_token"),
    (check_vllm_folder, "peagle", {"architectures": ["PEagleDraftModel"]}, "before which vLLM puts Eagle3"),
    (check_sglang_folder, "dspark", {"markov_head_type": None}, "no markov_head_type, which SGLang needs"),
    (check_sglang_folder, "dspark", {"architectures": ["DSparkDraftModel"]}, "whose fields lie where SGLang"),
    (check_sglang_folder, "dspark", {"num_target_layers": None}, "has no num_target_layers"),
    (check_sglang_folder, "eagle3", {"architectures": ["Eagle3LlamaForCausalLM"]}, "name that SGLang does not know"),
    (check_sglang_folder, "eagle3", {"architectures": ["LlamaForCausalLM"]}, "name that SGLang does not know"),
    (check_sglang_folder, "eagle3", {"architectures": ["Eagle3Qwen3ForCausalLM"]}, "queries and keys are normed"),
    (check_sglang_folder, "eagle3", {"draft_vocab_size": None}, "has no draft_vocab_size"),
    (check_sglang_folder, "eagle3, every option", {"eagle_config": {IDS: None}}, "at the top level only"),
    (check_sglang_folder, "eagle3", {"tie_word_embeddings": True}, "has tie_word_embeddings=true"),
    (check_sglang_folder, "dflash", {"dflash_config": {"mask_token_id": None}}, "no dflash_config.mask_token_id"),
    (check_sglang_folder, "dflash", {"num_target_layers": None}, "has no num_target_layers"),
    (check_vllm_folder, "dflash2, reduced", {}, "vLLM takes a candidate's row for its token"),
    (check_sglang_folder, "dflash2, reduced", {}, "blocks from a reduced vocabulary, and SGLang takes the target's"),
    (check_sglang_folder, "dflash, reduced", {}, "blocks from a reduced vocabulary, and SGLang takes the target's"),
    (check_vllm_folder, "dflash, reduced", {"draft_vocab_size": None}, "has a d2t although its vocabulary is the"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "case", "changes", "line"),
    FLAWS,
    ids=lambda value: getattr(value, "__module__", str(value)[:40]),
)
def test_field_that_one_engine_needs_elsewhere(export, target, check, case, changes, line):
    folder = export(case)
    edit(folder, changes)
    with pytest.raises(ArtifactError, match=line) as caught:
        check(folder, target)
    assert str(caught.value).startswith(f"draft {folder} cannot be served by ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("check", "case", "line"),
    [
        (check_vllm_folder, "eagle3, mla", "quantised and it has latent attention"),
        (check_sglang_folder, "dflash", "issue 39087"),
        (check_sglang_folder, "eagle3", "issue 39087"),
        (check_llamacpp_export, "eagle3", "quantised as vLLM reads them"),
    ],
)
def test_a_quantised_draft_is_refused_by_what_would_misread_it(export, target, check, case, line):
    folder = export(case)
    quantise_folder(folder, recognise(folder, target).quantised_modules, "int8")
    with pytest.raises(ArtifactError, match=line):
        check(folder, target)


@pytest.mark.parametrize(("layout", "anchor"), [("dspark", True), (None, False)])
def test_an_anchor_that_vllm_reads_from_a_later_version_on(export, target, layout, anchor):
    folder = export("dspark")
    edit(folder, {"speculators_model_type": layout, "sample_from_anchor": anchor})
    check_vllm_folder(folder, target)
    with pytest.raises(
        ArtifactError, match=r"from 0\.28 on whether the first slot of its blocks makes a guess"
    ):
        check_vllm_folder(folder, target, is_before_28=True)
    edit(folder, {"sample_from_anchor": not anchor})
    check_vllm_folder(folder, target, is_before_28=True)


def test_embeddings_of_images_decide_which_engine_serves_and_which_one_is_warned_of(target, tmp_path, caplog):
    warn_once.cache_clear()  # of another test
    seeing, plugin = replace(target, image_token_id=96), plugins.load(Draft, "eagle3")
    made = {}
    for kind, engines in (("merged", {"sglang"}), ("placeholder", {"sglang", "vllm"})):
        draft = plugin(plugin.Config(name="eagle3", image_embeddings=kind))
        made[kind] = export_untrained(draft, seeing, tmp_path / kind)
        assert serving_commands(seeing, draft, made[kind], 3).keys() == engines
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("this draft was trained with the placeholder's embeddings at images")
    merged = made["merged"]
    check_sglang_folder(merged, seeing)
    with pytest.raises(ArtifactError, match="vLLM gives it the placeholder's") as caught:
        VllmEngine.check_draft(VllmConfig(name="vllm"), seeing, recognise(merged, seeing), merged, 3)
    assert "\n" not in str(caught.value)


def test_top_level_layers_are_enough_where_they_are_the_default(export, target):
    folder = export("eagle3")
    edit(folder, {"eagle_config": {IDS: None}})
    check_sglang_folder(folder, target)


def test_prefix_that_vllm_adds_itself(export, target):
    folder = export("eagle3")
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    check_sglang_folder(folder, target)
    with pytest.raises(ArtifactError, match="have the prefix model"):
        check_vllm_folder(folder, target)


def test_mapping_of_a_whole_vocabulary(export, target):
    import torch

    folder = export("eagle3")
    tensors = load_file(folder / "model.safetensors")
    zeros = {"d2t": torch.zeros(97, dtype=torch.int64)}
    save_file(tensors | zeros, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match="vLLM has no place for it"):
        check_vllm_folder(folder, target)
