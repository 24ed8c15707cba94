"""Activations that are computed again in the backward pass: what is kept for it."""

from spec_kit.block_drafting import BlockRule, Blocks

from ..draft_batches import make_batch, random_documents
from ..draft_parts import KeptForBackward, make_ops, make_target
from .cases import make_config, make_model


def kept(num_layers: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes that are kept of the layers for the backward pass, and the number of slots."""
    options = {"num_layers": num_layers, "num_features": 3, "checkpoint_activations": recompute}
    target, config = make_target(), make_config(**options, num_anchors=512)
    documents = random_documents(target, [400], 1, 4)
    module, batch, ops = make_model(target, config), make_batch(documents, [0]), make_ops(target)
    blocks = Blocks.of(batch, BlockRule(config.num_anchors, 4))
    with KeptForBackward() as counted:
        states_ABH = module.states(batch, blocks, ops)
    return counted.num_bytes, states_ABH.shape[:2].numel()


def test_a_further_layer_keeps_its_input_alone():
    per_slot = {}
    for flag in (False, True):
        (fewer, slots), (more, _) = (kept(count, recompute=flag) for count in (2, 3))
        per_slot[flag] = (more - fewer) / slots / 4
    assert per_slot[True] == 16
    assert per_slot[False] > 16 * 16
