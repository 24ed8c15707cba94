"""Values are spread over guesses as vLLM's rejection sampling wants them."""

import torch

from spec_engine_vllm.sampler_check import spread


def test_each_value_stands_for_all_guesses_of_its_request() -> None:
    values, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert spread(values, ends, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]


def test_a_value_can_be_replaced_on_the_way() -> None:
    values, ends = torch.tensor([0.7, 0.0]), torch.tensor([1, 3], dtype=torch.int32)
    assert (
        spread(values, ends, 3, replace_from=0, replace_to=1).tolist() == torch.tensor([0.7, 1, 1]).tolist()
    )


def test_integers_stay_integers() -> None:
    values, ends = torch.tensor([5, 7]), torch.tensor([1, 2], dtype=torch.int32)
    assert spread(values, ends, 2).dtype == torch.int64
