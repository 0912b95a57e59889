"""Tests of the limits of control groups: both versions, nested groups, and containers that see the host's paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.machine.memory import MemoryGroup, memory_groups, processor_quota
from tests.support.control_groups import in_group, needs_groups, real_group

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
NO_LIMIT = "9223372036854771712"


def put(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def groups(lines: str, *mounts: str) -> dict[str, str]:
    return {"proc/self/cgroup": lines, "proc/self/mountinfo": "\n".join(mounts)}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (groups("0::/", V2), None),
        ({**groups("0::/", V2), "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({**groups("0::/", V2), "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({**groups("0::/", V2), "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({**groups("0::/", V2), "sys/fs/cgroup/cpu.max": "1 0"}, None),
        ({**groups("0::/", V2), "sys/fs/cgroup/cpu.max": "nothing"}, None),
        # the strictest of nested groups
        (
            {
                **groups("0::/user.slice/run.scope", V2),
                "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
                "sys/fs/cgroup/user.slice/run.scope/cpu.max": "300000 100000",
            },
            2.0,
        ),
        # another group's limit
        ({**groups("0::/a", V2), "sys/fs/cgroup/b/cpu.max": "1 10", "sys/fs/cgroup/a/cpu.max": "9 3"}, 3.0),
        # version 1
        (
            {
                **groups("4:cpu,cpuacct:/", V1_CPU),
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {
                **groups("4:cpu,cpuacct:/", V1_CPU),
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        # a leftover of version 1 beside version 2
        (
            {
                **groups(
                    "1:name=systemd:/x\n0::/", V2, "40 31 0:3 / /sys/fs/cgroup/systemd rw - cgroup c rw,name=systemd"
                ),
                "sys/fs/cgroup/cpu.max": "100000 100000",
            },
            1.0,
        ),
        # Docker with the host's groups: the path is the host's, and the mount begins at the container's group
        (
            {
                **groups(
                    "4:cpu,cpuacct:/docker/abc",
                    V1_CPU.replace(" / ", " /docker/abc "),
                ),
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            1.0,
        ),
        # the process is outside of what the container sees
        ({**groups("0::/../other", V2), "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
        # the path names a group that is not visible
        ({**groups("0::/kubepods/pod1/c", V2), "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
        # a mount point with a space
        ({**groups("0::/", V2.replace("/sys/fs/cgroup", r"/sys/c\040g")), "sys/c g/cpu.max": "700000 100000"}, 7.0),
    ],
)
def test_the_strictest_cpu_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert processor_quota(put(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        (groups("0::/", V2), []),
        ({**groups("0::/", V2), "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.high": "max"}, []),
        (
            {
                **groups("0::/", V2),
                "sys/fs/cgroup/memory.max": "9000",
                "sys/fs/cgroup/memory.current": "8000",
                "sys/fs/cgroup/memory.stat": "anon 2000\nfile 6000\ninactive_file 4000\nactive_file 1500",
            },
            [MemoryGroup(9000, 8000, 5500)],
        ),
        (
            {
                **groups("0::/a/b", V2),
                "sys/fs/cgroup/a/b/memory.high": "500",
                "sys/fs/cgroup/a/memory.max": "400",
                "sys/fs/cgroup/a/memory.current": "300",
            },
            [MemoryGroup(500, 0, 0), MemoryGroup(400, 300, 0)],
        ),
        (
            {
                **groups("5:memory:/x", V1_MEMORY),
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "600",
                "sys/fs/cgroup/memory/x/memory.stat": "active_file 1\ntotal_inactive_file 70\ntotal_active_file 30",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
            },
            [MemoryGroup(700, 600, 100)],
        ),
    ],
)
def test_every_group_with_limited_memory_counts(
    tmp_path: Path, files: dict[str, str], expected: list[MemoryGroup]
) -> None:
    assert memory_groups(put(tmp_path, files)) == expected


@given(st.text(), st.text(), st.text(), st.text().map("inactive_file {}".format))
def test_no_text_of_the_system_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, cgroup: str, mounts: str, limit: str, stat: str
) -> None:
    root = tmp_path_factory.mktemp("system")
    files = {
        **groups(f"0::/\n{cgroup}", V2, mounts),
        "sys/fs/cgroup/cpu.max": limit,
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.stat": stat,
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode("utf-8", "replace"))
    processor_quota(root)
    memory_groups(root)


# Real groups, which only root can make.


def printed_in(group: Path, expression: str) -> str:
    """Evaluate an expression in a Python process of the group."""
    code = f"from llmrun.base.machine import cpu_count, memory; print({expression})"
    done = subprocess.run(in_group(group, [sys.executable, "-c", code]), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def quota(microseconds: int) -> dict[str, str]:
    return {"cpu.cfs_quota_us": str(microseconds), "cpu.max": f"{microseconds} 100000"}


@needs_groups
@pytest.mark.parametrize(("microseconds", "printed"), [(50_000, "0.5 1"), (150_000, "1.5 1"), (100_000, "1.0 1")])
def test_a_real_quota_limits_the_threads(microseconds: int, printed: str) -> None:
    with real_group("cpu", quota(microseconds)) as group:
        assert printed_in(group, "memory.processor_quota(), cpu_count.most_threads()") == printed


@needs_groups
def test_a_real_quota_of_an_outer_group_counts() -> None:
    with real_group("cpu", quota(120_000)) as outer, real_group("cpu", {}, outer) as inner:
        assert printed_in(inner, "memory.processor_quota()") == "1.2"


@needs_groups
def test_a_real_memory_limit_leaves_less_free() -> None:
    limit = {"memory.limit_in_bytes": str(300 << 20), "memory.max": str(300 << 20)}
    with real_group("memory", limit) as group:
        whole, free = printed_in(group, "memory.whole_memory(), memory.free_memory()").split()
    assert int(whole) == 300 << 20
    assert 200 << 20 < int(free) < 300 << 20
