"""How the tests themselves are spread over several workers."""

import pytest


def test_the_tests_of_a_file_reach_the_scheduler_as_a_group(request) -> None:
    """Without it nothing fails, but every worker makes anew what a file's tests share."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("not spread over workers by --dist loadgroup")
    assert request.node.nodeid.endswith("@test_workers")
