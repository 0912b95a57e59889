"""Tests of who may join or start a background engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from llmrun.base.machine.cpu_count import allowed_processors
from llmrun.serving.background.eligibility import (
    UNLIMITED,
    Standing,
    difference,
    reason_not_to_join,
    reason_not_to_start_unasked,
)

VARIABLES = ("CI", "SUDO_UID", "SUDO_USER", "DOAS_USER", "PKEXEC_UID", "container", "KUBERNETES_SERVICE_HOST")


def act_as(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    for name in ("getuid", "geteuid", "getgid", "getegid"):
        monkeypatch.setattr(os, name, lambda: user)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Act as a user at home, outside of containers."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    act_as(monkeypatch, 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


# Who may join.


def test_a_plain_user_may_join_and_start(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert reason_not_to_join() == ""
    assert reason_not_to_start_unasked(tmp_path) == ""


@pytest.mark.parametrize("name", ["geteuid", "getegid"])
def test_setuid_programs_do_not_join(plain: pytest.MonkeyPatch, name: str) -> None:
    plain.setattr(os, name, lambda: 7)
    assert reason_not_to_join() == "the process has the rights of another user or group"


@pytest.mark.parametrize("variable", ["SUDO_UID", "SUDO_USER", "DOAS_USER", "PKEXEC_UID"])
def test_users_who_became_root_do_not_join(plain: pytest.MonkeyPatch, variable: str) -> None:
    plain.setenv(variable, "1000")
    assert reason_not_to_join() == ""  # as with `sudo -u`
    act_as(plain, 0)
    plain.setenv("HOME", "/")
    assert reason_not_to_join() == "another user became root, for example with sudo"
    plain.setenv(variable, "root" if variable.endswith("USER") else "0")
    assert reason_not_to_join() == ""


def test_root_in_the_home_of_another_user_does_not_join(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    act_as(plain, 0)
    plain.setenv("HOME", "/")
    assert reason_not_to_join() == ""
    home = tmp_path / "home"
    home.mkdir()
    if home.stat().st_uid == 0:
        os.chown(home, 65534, 65534)
    plain.setenv("HOME", str(home))
    assert reason_not_to_join() == "root uses the home directory of another user"
    assert reason_not_to_start_unasked(tmp_path) == reason_not_to_join()


@pytest.mark.parametrize("home", [None, "", "/no/such/folder"])
def test_root_without_a_home_may_join(plain: pytest.MonkeyPatch, home: str | None) -> None:
    """Whether there is a folder for the socket is another question."""
    act_as(plain, 0)
    plain.delenv("HOME") if home is None else plain.setenv("HOME", home)
    assert reason_not_to_join() == ""


def test_windows_does_not_join(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(sys, "platform", "win32")
    assert reason_not_to_join() == "background engines do not work on this system"


# Who may start one unasked.


@pytest.mark.parametrize(
    ("value", "is_ci"), [("true", True), ("1", True), ("woodpecker", True), ("False", False), ("0", False), ("", False)]
)
def test_ci_starts_no_engine(plain: pytest.MonkeyPatch, tmp_path: Path, value: str, is_ci: bool) -> None:
    plain.setenv("CI", value)
    assert bool(reason_not_to_start_unasked(tmp_path)) is is_ci
    assert reason_not_to_join() == ""


@pytest.mark.parametrize("variable", ["container", "KUBERNETES_SERVICE_HOST"])
def test_container_variables_are_known(plain: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    plain.setenv(variable, "oci")
    assert reason_not_to_start_unasked(tmp_path) == "the process is in a container"
    assert reason_not_to_join() == ""


@pytest.mark.parametrize("file", [".dockerenv", "run/.containerenv"])
def test_container_files_are_known(plain: pytest.MonkeyPatch, tmp_path: Path, file: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / file).touch()
    assert reason_not_to_start_unasked(tmp_path) == "the process is in a container"


# The resources that a process may use.

PLAIN = Standing((0, 1), (0, 0), None, (), UNLIMITED, "mnt:[1] 1:2", "pid:[1]", "user:[1]")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"priority": (0, 5)}, "the process has a low priority (nice)"),
        ({"processors": ()}, "the process may not use all processors"),
        ({"quota": 1.5}, "the process may not use all processors"),
        ({"groups": ("1000, /sys/fs/cgroup/a",)}, "the memory, the CPU time or the files of the process are limited"),
        ({"limits": (None, 60, None)}, "the memory, the CPU time or the files of the process are limited"),
    ],
)
def test_restricted_processes_start_nothing_unasked(
    plain: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    plain.setattr(os, "cpu_count", lambda: 2)
    plain.setattr(Standing, "of_this_process", lambda root: PLAIN._replace(**changed))
    assert reason_not_to_start_unasked(tmp_path) == reason
    assert reason_not_to_join() == ""


def test_a_standing_survives_json() -> None:
    own = Standing.of_this_process()
    assert Standing.from_json(json.loads(json.dumps(own.as_json()))) == own
    assert difference(own, Standing.of_this_process()) == ""
    assert own.processors == tuple(sorted(own.processors))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (PLAIN._replace(processors=(0,)), "run on different processors"),
        (PLAIN._replace(processors=(1, 2)), "run on different processors"),
        (PLAIN._replace(priority=(0, 10)), "have different priorities"),
        (PLAIN._replace(priority=(5, 0)), "have different priorities"),
        (PLAIN._replace(quota=1.5), "have different CPU limits"),
        (PLAIN._replace(groups=("9000, /sys/fs/cgroup/a",)), "have different memory limits"),
        (PLAIN._replace(limits=(1 << 30, None, None)), "have different limits (ulimit)"),
        (PLAIN._replace(files="mnt:[2] 1:2"), "see different file systems"),
        (PLAIN._replace(files="mnt:[1] 1:3"), "see different file systems"),
        (PLAIN._replace(processes="pid:[2]"), "see different processes"),
        (PLAIN._replace(users="user:[2]"), "are in different user namespaces"),
    ],
)
def test_only_equals_share_an_engine(changed: Standing, reason: str) -> None:
    """An engine with stricter limits than the client's would be slower than the client itself."""
    assert difference(PLAIN, PLAIN) == ""
    for pair in ((changed, PLAIN), (PLAIN, changed)):
        assert difference(*pair).startswith(f"this process and the background engine {reason}")


@pytest.mark.parametrize("name", Standing._fields)
def test_each_value_is_compared(name: str) -> None:
    assert difference(PLAIN, Standing.from_json(PLAIN.as_json() | {name: "other"}))


@pytest.mark.parametrize("missing", Standing._fields)
def test_missing_values_are_differences(missing: str) -> None:
    sent = PLAIN.as_json()
    del sent[missing]
    assert difference(Standing.from_json(sent), PLAIN)


def test_limits_of_groups_count_by_group(tmp_path: Path) -> None:
    """Groups with equal limits share no memory. A group without a limit, such as a terminal's, does not count."""
    mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"

    def standing(group: str, limit: str) -> Standing:
        root = tmp_path / group
        folder = root / "sys/fs/cgroup" / group
        for path, text in {
            root / "proc/self/cgroup": f"0::/{group}\n",
            root / "proc/self/mountinfo": mount,
            folder / "memory.max": limit,
            folder / "cpu.max": "150000 100000",
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = Standing.of_this_process(root)
        return found._replace(groups=tuple(each.replace(str(root), "") for each in found.groups), files="")

    first = standing("a", "5000")
    assert (first.groups, first.quota) == (("5000, /sys/fs/cgroup/a",), 1.5)
    assert "memory limits" in difference(first, standing("b", "5000"))
    assert difference(standing("a", "max"), standing("b", "max")) == ""


def test_reading_the_standing_is_fast() -> None:
    """A start can afford 2 ms. The best of ten attempts counts, because the machine may be busy."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        Standing.of_this_process()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.002


def standing_printed_by(*prefix: str, before: str = "pass") -> Standing:
    """Return the standing of a process that is started through another program, and first runs this code."""
    code = (
        "import json, os\n"
        "from llmrun.serving.background.eligibility import Standing\n"
        f"{before}\n"
        "print(json.dumps(Standing.of_this_process().as_json()))"
    )
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return Standing.from_json(json.loads(done.stdout))


@pytest.mark.push
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root directory")
def test_another_root_directory_is_seen(tmp_path: Path) -> None:
    own = Standing.of_this_process()
    namespaces = tmp_path / "proc/self/ns"
    namespaces.mkdir(parents=True)
    for name in ("mnt", "pid", "user"):
        (namespaces / name).symlink_to((Path("/proc/self/ns") / name).readlink())
    client = standing_printed_by(before=f"Standing.of_this_process(); os.chroot({str(tmp_path)!r})")
    assert (client.processes, client.users) == (own.processes, own.users)
    assert "see different file systems" in difference(client, own)


@pytest.mark.push
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have few of these limits")
@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("", ""),
        ("taskset -c {first}", "run on different processors"),
        ("nice -n 5", "have different priorities"),
        ("chrt -i 0", "have different priorities"),
        ("prlimit --as=4000000000", "have different limits (ulimit)"),
        ("prlimit --cpu=600", "have different limits (ulimit)"),
        ("prlimit --fsize=1000000", "have different limits (ulimit)"),
        ("unshare -m", "see different file systems"),
        ("unshare -p -f", "see different processes"),
        ("unshare -U", "are in different user namespaces"),
    ],
)
def test_real_restrictions_are_seen(prefix: str, reason: str) -> None:
    if (
        "unshare" in prefix
        and subprocess.run(["unshare", "-m", "true"], check=False, stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("this process cannot create namespaces")
    processors = sorted(allowed_processors())
    if "taskset" in prefix and len(processors) < 2:
        pytest.skip("this process has one processor")
    client = standing_printed_by(*prefix.format(first=processors[0]).split())
    found = difference(client, Standing.of_this_process())
    assert reason in found
    assert bool(reason) == bool(found)
