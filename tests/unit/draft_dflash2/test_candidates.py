"""Candidates are the largest logits, and gradients of the selector's tables are summed in a fixed order."""

import pytest
import torch

from spec_draft_dflash2.candidates import largest
from spec_draft_dflash2.selector import sum_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [64 * 80, 64 * 80 + 1, 64])
def test_candidates_are_the_largest_logits_also_with_many_equal_ones(dtype, width):
    logits_RV = torch.randn(50, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits_RV[7:9] = 3  # every logit is as large as every other
    top_RC, column_RC = largest(logits_RV, 16)
    assert torch.equal(top_RC, logits_RV.sort(descending=True).values[:, :16])
    assert torch.equal(logits_RV.gather(1, column_RC), top_RC)
    assert all(len(set(columns)) == 16 for columns in column_RC.tolist())


def test_rows_of_equal_tokens_are_summed_in_the_same_order_each_time():
    """Several threads add many rows to each token's row; in another order a resumed run gets other bits."""
    threads, draw = torch.get_num_threads(), torch.Generator().manual_seed(0)
    id_N = torch.randint(0, 40, (600 * 64,), generator=draw)
    rows_Nr = torch.randn(600 * 64, 32, generator=draw)
    torch.set_num_threads(4)
    try:
        tables = [sum_rows(torch.ones(50, 32), id_N, rows_Nr) for _ in range(9)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(table, tables[0]) for table in tables)
    one_hot = torch.nn.functional.one_hot(id_N, 50).double()
    torch.testing.assert_close(tables[0].double(), one_hot.T @ rows_Nr.double(), rtol=1e-4, atol=1e-3)
