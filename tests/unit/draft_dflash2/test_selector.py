"""Gradients of the selector's tables are summed in a fixed order."""

from __future__ import annotations

import torch

from spec_draft_dflash2.selector import add_rows


def test_rows_of_equal_tokens_are_summed_in_the_same_order_each_time():
    """Several threads add many rows to each token's row; in another order a resumed run gets other bits."""
    threads, draw = torch.get_num_threads(), torch.Generator().manual_seed(0)
    id_RC = torch.randint(0, 40, (600, 64), generator=draw)
    rows_RCr = torch.randn(600, 64, 32, generator=draw)
    torch.set_num_threads(4)
    try:
        tables = [torch.zeros(50, 32) for _ in range(9)]
        for table in tables:
            add_rows(table, id_RC, rows_RCr)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(table, tables[0]) for table in tables)
    one_hot = torch.nn.functional.one_hot(id_RC.flatten(), 50).double()
    torch.testing.assert_close(
        tables[0].double(), one_hot.T @ rows_RCr.flatten(0, 1).double(), rtol=1e-4, atol=1e-3
    )
