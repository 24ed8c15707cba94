"""Whole tensors of which ranks hold parts: each is worked on once, and the ranks share out the work."""

import torch
import torch.distributed as dist

from spec_kit.sharding import Parts, map_dealt
from spec_testing.processes import run_ranks

LIMIT_S = 120.0
NAMES = ("a", "b", "c")


def whole(name: str) -> torch.Tensor:
    return torch.arange(8.0).reshape(4, 2) * (1 + NAMES.index(name))


def deal(me, folder):
    """Return what this rank has of the results, and how many tensors it has worked on."""
    dist.init_process_group("gloo", f"file://{folder}/group", rank=me.rank, world_size=me.world_size)
    rows = 4 // me.world_size
    worked_on = []

    def normed(tensor):
        worked_on.append(tensor.shape)
        return (tensor / tensor.sum()).mT.contiguous().mT  # its memory is in another order

    def gather(name, part):
        everyones = [torch.empty_like(part) for _ in range(me.world_size)]
        dist.all_gather(everyones, part, group=dist.group.WORLD)
        return torch.cat(everyones)

    def cut(name, tensor):
        return tensor[rows * me.rank : rows * (me.rank + 1)]

    parts = {name: cut(name, whole(name)) for name in NAMES}
    results = map_dealt(normed, parts, Parts(gather=gather, cut=cut, group=dist.group.WORLD))
    dist.destroy_process_group()
    return {name: part.tolist() for name, part in results.items()}, len(worked_on)


def test_each_whole_tensor_is_worked_on_by_one_rank_and_every_rank_gets_its_part(tmp_path):
    (first, worked_first), (second, worked_second) = run_ranks(deal, 2, tmp_path, timeout_s=LIMIT_S)
    assert (worked_first, worked_second) == (2, 1)
    for name in NAMES:
        expected = whole(name) / whole(name).sum()
        torch.testing.assert_close(torch.tensor(first[name] + second[name]), expected)
