"""States of rows with images are those of the transformers model that sees the images."""

import functools
from dataclasses import replace

import pytest
import torch
import transformers

from spec_core.errors import DataError, EngineError
from spec_core.records import CaptureRequest, ImageSource, PromptWithImages, SamplingParams
from spec_engine_hf import decoding
from spec_trainer.cli.quickstart.baselines import PromptLookupProposer

from ...captured_states import captured
from ...image_requests import arrays_of, picture, reference_states, request_of
from ...seeing_targets import ALL_SEEING, IMAGE_ID, TWO_WAY

SIZES = ((20, 12), (33, 47), (8, 90))


def assert_close(found, expected):
    """Up to rounding, which a CPU chooses by the number of rows: an expert gets other tokens in another batch."""
    assert torch.allclose(found, expected, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("model_type", ALL_SEEING)
def test_states_at_every_row_are_those_of_the_model_that_sees(
    seeing_target, open_engine, schema_of, model_type
):
    folder = seeing_target(model_type)
    alike = [[picture((24, 24), seed)] for seed in (0, 1)]
    shown = [*alike, [], [picture(SIZES[0])], [picture(size) for size in SIZES]]
    requests = [request_of(folder, pictures) for pictures in shown]
    assert requests[0].input_ids == requests[1].input_ids
    engine = open_engine(folder)
    states = captured(engine, engine.context.transport, schema_of(*range(9)), requests)
    for found, request, pictures in zip(states, requests, shown, strict=True):
        assert_close(found, reference_states(folder, request, pictures))
    place, (first, second, *_) = requests[0].input_ids.index(IMAGE_ID), states
    assert_close(first[:place], second[:place])
    assert (first[place:] - second[place:]).abs().amax(dim=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("model_type", ALL_SEEING)
def test_text_is_decoded_as_before_after_images_were_captured(
    seeing_target, open_engine, schema_of, model_type
):
    """A model must not keep the images' offset between tokens and positions."""
    folder = seeing_target(model_type)
    engine = open_engine(folder)
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, stop_at_eos=False)
    prompts = [[5, 6, 7, 8, 9], [40, 41]]
    before = [answer.token_ids for answer in engine.generate(prompts, sampling)]
    captured(engine, engine.context.transport, schema_of(2), [request_of(folder, [picture(SIZES[1])])])
    assert [answer.token_ids for answer in engine.generate(prompts, sampling)] == before
    for prompt, answer in zip(prompts, before, strict=True):
        assert_as_reference(folder, prompt, [], answer)


def test_images_that_do_not_take_the_rows_tokens_are_an_engine_error(seeing_target, open_engine, schema_of):
    folder = seeing_target("qwen2_5_vl")
    request = request_of(folder, [picture(SIZES[0])])
    wrong = CaptureRequest(
        request_id=0, input_ids=request.input_ids, images=(picture(SIZES[1])[0],), destinations=()
    )
    with pytest.raises(EngineError, match="failed in a forward pass"):
        open_engine(folder).capture([wrong], schema_of(2)).result(60)


def prompts_of(folder, shown):
    """Prompts about pictures; one without pictures is a plain list."""
    requests = [request_of(folder, pictures) for pictures in shown]
    return [PromptWithImages(r.input_ids, r.images) if r.images else list(r.input_ids) for r in requests]


@functools.cache
def model_of(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def assert_as_reference(folder, prompt, pictures, token_ids, margin=None):
    """Compare with the whole model without a cache, with the positions that it computes itself: its choice behind
    each token, and the gap of its two largest logits."""
    ids = torch.tensor([[*prompt, *token_ids]])
    arrays = arrays_of(folder, ids, pictures)
    with torch.no_grad():
        best = model_of(folder)(ids, use_cache=False, **arrays).logits[0, len(prompt) - 1 : -1].topk(2)
    assert token_ids == tuple(best.indices[:, 0].tolist())
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    assert margin is None or margin == pytest.approx(gaps, abs=1e-4)


def assert_as_references(folder, answers, prompts, shown):
    for answer, prompt, pictures in zip(answers, prompts, shown, strict=True):
        assert_as_reference(folder, prompt, pictures, answer.token_ids, answer.top2_margin)


SHOWN = ([], [picture(SIZES[0])], [picture(size) for size in SIZES], [], [picture(SIZES[1])])
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0, stop_at_eos=False)


def some(*types):
    """All types as parameters; those that are not named are for each night."""
    return [pytest.param(one, marks=[] if one in types else pytest.mark.slow) for one in ALL_SEEING]


@pytest.mark.parametrize("model_type", some("qwen2_5_vl", "qwen3_5", TWO_WAY))
def test_greedy_answers_to_prompts_with_images_are_the_models(seeing_target, open_engine, model_type):
    """Texts and images share the batches; while one is decoded, others begin and end."""
    folder = seeing_target(model_type)
    engine, prompts = open_engine(folder, max_num_seqs=3), prompts_of(folder, SHOWN)
    engine.use_proposer(PromptLookupProposer)
    for num_draft_tokens in (0, 3):
        sampling = replace(GREEDY, num_draft_tokens=num_draft_tokens)
        assert_as_references(folder, engine.generate(prompts, sampling), prompts, SHOWN)
    assert engine.acceptance().accepted > 0


@pytest.mark.parametrize("model_type", some("qwen2_5_vl", TWO_WAY))
def test_near_ties_are_decided_by_text_and_images(seeing_target, open_engine, monkeypatch, model_type):
    """Each choice is made anew by a forward pass of the text alone, which must see the images, too."""
    monkeypatch.setattr(decoding, "_NEAR_TIE", 1e9)
    folder = seeing_target(model_type)
    prompts = prompts_of(folder, SHOWN[:3])
    assert_as_references(folder, open_engine(folder).generate(prompts, GREEDY), prompts, SHOWN[:3])


def test_answer_depends_on_the_image_alone(seeing_target, open_engine):
    """Equal tokens with other images have other logits; where in the batch an image is changes a rounding at most."""
    folder = seeing_target("qwen3_vl")
    one, other = prompts_of(folder, [[picture((24, 24), seed)] for seed in (0, 1)])
    assert one.token_ids == other.token_ids
    engine = open_engine(folder)
    first, second, again = engine.generate([one, other, one], GREEDY)
    assert first.top2_margin == pytest.approx(again.top2_margin, abs=1e-5)
    assert first.top2_margin != pytest.approx(second.top2_margin, abs=1e-2)


def test_prompts_image_that_has_changed_is_refused(seeing_target, open_engine, tmp_path):
    folder, file = seeing_target("qwen2_5_vl"), tmp_path / "a.png"
    source, image = picture(SIZES[0])
    file.write_bytes(source.data)
    (prompt,) = prompts_of(folder, [[(ImageSource.of_file(str(file)), image)]])
    engine = open_engine(folder)
    (before,) = engine.generate([prompt], GREEDY)
    file.write_bytes(picture(SIZES[0], seed=1)[0].data)
    with pytest.raises(DataError, match=r"a\.png has changed since the data was read"):
        engine.generate([prompt], GREEDY)
    file.write_bytes(source.data)
    assert engine.generate([prompt], GREEDY)[0].token_ids == before.token_ids
