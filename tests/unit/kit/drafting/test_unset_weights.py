"""Modules of a draft with stored weights are built without random ones, and everything else is as usual."""

import torch
from torch import nn

from spec_kit.drafting.unset_weights import UnsetWeights
from spec_kit.layers.decoder_parts import linear


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.bilinear = linear(6, 5), nn.Linear(5, 3)
        self.norm = nn.RMSNorm(3)
        self.own = nn.Parameter(torch.randn(4))
        self.register_buffer("frequencies", 2.0 ** torch.arange(4), persistent=False)


def test_no_weight_of_a_layer_is_drawn():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with UnsetWeights():
        layer, other = linear(64, 32), nn.Linear(16, 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert (layer.weight.shape, other.bias.shape) == ((32, 64), (8,))
    assert layer.weight.requires_grad
    linear(64, 32)
    assert not torch.equal(torch.get_rng_state(), before)


def test_values_that_are_not_drawn_are_set_and_stored_weights_replace_the_rest():
    stored = Part()
    with UnsetWeights():
        part = Part()
    assert torch.equal(part.norm.weight, torch.ones(3))
    assert torch.equal(part.frequencies, stored.frequencies)
    part.load_state_dict(stored.state_dict())
    for name, tensor in stored.state_dict().items():
        assert torch.equal(part.state_dict()[name], tensor), name
