"""The memory left on a host, by files as the kernel writes them for both versions of cgroups."""

from pathlib import Path

import psutil
import pytest

from spec_trainer.plan.host_memory import free_host_bytes

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path):
    """``cgroup(own, {folder: {file: content}})``: the memory left to a process in such a tree."""

    def left(own: str, tree: dict[str, dict[str, str]]) -> int:
        for folder, files in tree.items():
            (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (tmp_path / "cgroup" / folder / name).write_text(content)
        (tmp_path / "own").write_text(own)
        return free_host_bytes(tmp_path / "cgroup", tmp_path / "own")

    return left


def test_without_a_limit_it_is_what_the_kernel_calls_available(cgroup):
    left = cgroup("0::/a\n", {"a": {"memory.max": "max\n", "memory.current": f"{5 * MIB}\n"}})
    assert left == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_limit_of_version_2_counts_without_the_cache_that_can_be_given_up(cgroup):
    files = {
        "memory.max": f"{100 * MIB}\n",
        "memory.current": f"{70 * MIB}\n",
        "memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
    }
    assert cgroup("0::/a/b\n", {"a/b": files}) == 50 * MIB


def test_the_limit_of_a_cgroup_around_it_counts_too(cgroup):
    inner = {"memory.max": "max\n", "memory.current": "5\n"}
    outer = {"memory.max": f"{8 * MIB}\n", "memory.current": f"{MIB}\n"}
    assert cgroup("0::/a/b\n", {"a/b": inner, "a": outer}) == 7 * MIB


def test_in_a_container_the_limit_stands_at_the_mount(cgroup):
    """The path in /proc/self/cgroup is the host's there."""
    files = {"memory.max": f"{8 * MIB}\n", "memory.current": "0\n"}
    assert cgroup("0::/kubepods/pod1\n", {"": files}) == 8 * MIB


def test_a_limit_of_version_1(cgroup):
    files = {
        "memory.limit_in_bytes": f"{40 * MIB}\n",
        "memory.usage_in_bytes": f"{30 * MIB}\n",
        "memory.stat": f"cache 7\ntotal_inactive_file {4 * MIB}\n",
    }
    assert cgroup("9:cpuset:/x\n4:memory:/pod\n0::/\n", {"memory/pod": files}) == 14 * MIB


def test_a_full_cgroup_leaves_nothing(cgroup):
    assert cgroup("0::/\n", {"": {"memory.max": "100\n", "memory.current": "150\n"}}) == 0
