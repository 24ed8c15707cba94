"""A draft that reads the target's embeddings of images: its step, its guesses and its folder."""

from dataclasses import replace

import pytest
import torch

from spec_core.errors import ArtifactError, TargetError
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..draft_batches import GAPS, LENGTHS, decode, random_documents, step_arguments
from ..draft_folders import export, read_fields, write_fields
from ..draft_parts import gradients, make_ops, make_target
from ..draft_steps import assert_each_precision
from . import cases
from .cases import KERNEL_AND_CHUNKED, MLA, make_model, make_setting
from .dense_reference import dense_eagle3
from .unrolled_chain import assert_proposals_are_the_unrolled_forwards

IMAGE = 7
MERGED = {"image_embeddings": "merged"}
PACKED = [0] * len(LENGTHS)
CASES = {
    "plain": {},
    "reduced": {"vocab_size": 11, "loss": "lk_lambda"},
    "two layers": {"num_layers": 2, "checkpoint_activations": True},
    "mla": MLA,
}


def seeing_target(**changes):
    return make_target(image_token_id=IMAGE, **changes)


def seen_documents(target, lengths, seed):
    """Documents of which about half of the tokens are an image's, their ends among them."""
    documents = random_documents(target, lengths, seed, num_states=5)
    for number, document in enumerate(documents):
        draw = torch.rand(len(document.ids), generator=torch.Generator().manual_seed(number))
        document.ids[draw < 0.5] = IMAGE
    return documents


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("gaps", [PACKED, GAPS], ids=["packed", "padded"])
def test_loss_and_every_gradient_equal_the_dense_reference(options, gaps):
    target, config = seeing_target(), Eagle3Config(num_steps=4, **MERGED, **options)
    documents = seen_documents(target, LENGTHS, seed=5)
    result = assert_each_precision(cases, config, target, documents, gaps, KERNEL_AND_CHUNKED)[0]
    module = make_model(target, config)
    weights = {name: p.detach().double() for name, p in module.named_parameters()}
    setting = make_setting(target, module)
    for document in documents:
        document.states = document.states[:, 1:].double()
    other = dense_eagle3(weights, documents, replace(setting, image=None))
    assert abs(other.loss - result.loss) > 1e-3 * result.loss


def test_guesses_that_were_judged_equal_the_dense_reference():
    target, config = seeing_target(), Eagle3Config(num_steps=3, **MERGED)
    documents = seen_documents(target, LENGTHS, seed=5)
    decode(documents, seed=3)
    assert_each_precision(cases, config, target, documents, kernels=KERNEL_AND_CHUNKED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_alone_trains_bit_for_bit_as_without_the_key(dtype):
    target, config = seeing_target(), Eagle3Config(num_steps=3, **MERGED)
    documents = random_documents(target, LENGTHS, seed=5, num_states=5)
    for document in documents:
        document.ids[document.ids == IMAGE] = IMAGE + 1
    batch, counts, _ = step_arguments(Eagle3Draft(config), target, documents, GAPS)
    batch = replace(batch, hidden_TNH=batch.hidden_TNH.to(dtype))
    plain = replace(batch, hidden_TNH=batch.hidden_TNH[:, 1:])
    steps = []
    for given, options in ((batch, MERGED), (plain, {})):
        module = make_model(target, config.model_copy(update={"image_embeddings": None, **options}), dtype)
        output = module(given, counts, make_ops(target, dtype))
        output.loss.backward()
        steps.append((output.loss.detach(), output.metrics(), gradients(module)))
    (loss, metrics, grads), (plain_loss, plain_metrics, plain_grads) = steps
    assert torch.equal(loss, plain_loss)
    assert metrics == plain_metrics
    assert all(torch.equal(grad, plain_grads[name]) for name, grad in grads.items())


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {**MLA, "vocab_size": 11}], ids=str)
@pytest.mark.parametrize("cuts", [[10], [6, 10], [6, 8, 9, 10]], ids=str)
def test_proposals_are_those_of_the_unrolled_forward(options, cuts):
    """The prompt has two images; later tokens that look like an image's have their embedding as their state."""
    target, config = seeing_target(), Eagle3Config(num_steps=4, **MERGED, **options)
    (document,) = random_documents(target, [11], seed=4, num_states=5)
    document.ids[torch.tensor([1, 2, 4, 7])] = IMAGE
    document.ids[torch.tensor([6, 9, 10])] = 3
    document.states[7, 0] = make_ops(target).embed(torch.tensor(IMAGE))
    assert_proposals_are_the_unrolled_forwards(config, target, document, cuts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_token_id": None}, "the target sees no images"),
        ({"embedding_scale": 4.0}, "the target scales the embeddings of text"),
    ],
)
def test_targets_without_such_embeddings_are_refused_in_one_line(changes, reason):
    target = replace(seeing_target(), **changes)
    with pytest.raises(TargetError, match=f"{reason}.*set draft.image_embeddings=placeholder") as caught:
        Eagle3Draft(Eagle3Config(**MERGED)).check_target(target)
    assert "\n" not in str(caught.value)
    Eagle3Draft(Eagle3Config(image_embeddings="placeholder")).check_target(target)


def exported(folder, target, **options):
    export(cases, folder, target, **options)
    return read_fields(folder)


def test_folder_says_how_it_was_trained_and_an_option_says_how_it_is_trained_on(tmp_path):
    target = seeing_target()
    for kind, layers, engines in (
        ("merged", (0, 2, 4, 5, 8), {"sglang"}),
        ("placeholder", (2, 4, 5, 8), {"sglang", "vllm"}),
    ):
        other = {"merged": "placeholder", "placeholder": "merged"}[kind]
        folder = tmp_path / kind
        fields = exported(folder, target, image_embeddings=kind)
        assert fields["image_embeddings"] == kind
        assert fields["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        draft = Eagle3Draft.from_folder(folder)
        assert draft.required_features(target).layers == layers
        assert set(draft.serving_methods) == engines
        again = exported(tmp_path / "again", target, init_from=folder)
        assert again["image_embeddings"] == kind
        changed = exported(tmp_path / "changed", target, init_from=folder, image_embeddings=other)
        assert changed["image_embeddings"] == other


def test_folder_of_a_target_of_text_has_no_such_key(tmp_path):
    assert "image_embeddings" not in exported(tmp_path, make_target())
    assert exported(tmp_path, seeing_target())["image_embeddings"] == "placeholder"
    assert "image_embeddings" not in Eagle3Config().model_dump()


def test_folder_with_another_value_is_damaged(tmp_path):
    fields = exported(tmp_path, seeing_target(), **MERGED)
    write_fields(tmp_path, fields | {"image_embeddings": "blended"})
    with pytest.raises(
        ArtifactError, match=r"image_embeddings=.*blended.*expected 'placeholder' or 'merged'"
    ):
        Eagle3Draft.from_folder(tmp_path)
