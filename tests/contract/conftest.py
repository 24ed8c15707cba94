"""Leave the long parts of the contracts here to targets of their own in the Makefile."""

import os

import pytest


@pytest.fixture(autouse=True)
def few_divided_steps(request: pytest.FixtureRequest) -> None:
    """Skip D13 of our own drafts: ``tests/unit/strategy_megatron`` divides them, in fewer processes."""
    if request.node.name.startswith("test_d13") and "SPEC_TEST_ALL_OF_MEGATRON" not in os.environ:
        pytest.skip("seconds for each process: make test-megatron")
