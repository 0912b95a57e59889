"""Tests of the system description: facts come from the machine's files, are None if missing, and lead to warnings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llmrun.base.machine import system
from llmrun.base.machine.memory import memory_facts
from llmrun.base.machine.processor import frequency_facts, machine_facts, processor_name
from llmrun.jobs.bench.system import system_state, warnings_about, warnings_between
from tests.support.missing_packages import hide


def put(root: Path, **files: str) -> Path:
    """Write files by path, with `__` for `/`."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_tells_names_and_plain_values() -> None:
    state = system_state()
    assert state["cpu"]
    assert state["cores_logical"] >= state["threads"] >= 1
    assert state["memory_bytes"] > state["memory_free"] > 0
    assert state["cpu_level"]
    assert all(state[name] for name in ("os", "python", "llmrun", "numba", "llvmlite", "numpy", "llama_cpp_python"))
    assert json.loads(json.dumps(state)) == state
    for value in state.values():
        assert value is None or isinstance(value, str | int | float | list)
    assert all(isinstance(sentence, str) for sentence in warnings_about(state))


def test_packages_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "numba", "llvmlite")
    facts = system.system_facts()
    assert facts["numba"] is facts["llvmlite"] is None


def test_a_machine_that_tells_nothing_has_a_state_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise NotImplementedError

    for name in ("cpu_count", "getloadavg", "virtual_memory", "cpu_times"):
        monkeypatch.setattr(psutil, name, silent)
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    monkeypatch.setattr(system, "_LIBRARIES", ("no-such-library",))
    state = system_state(tmp_path)
    silent_names = {"cores_physical", "load_average", "memory_bytes", "memory_free", "stolen_seconds", "on_battery"}
    silent_names |= {"governor", "mhz", "mhz_max", "memory_mts", "virtual", "container", "cpu_quota", "no_such_library"}
    assert {name for name in silent_names if state[name] is not None} == set()
    assert state["cpu"]
    assert warnings_about(state) == []
    assert warnings_between(state, state) == []


def cpuinfo(*cores: tuple[int, int]) -> str:
    """Return what Linux on Arm says about cores with these implementers and parts."""
    return "".join(
        f"processor\t: {number}\nFeatures\t: fp asimd\nCPU implementer\t: {implementer:#x}\nCPU part\t: {part:#x}\n\n"
        for number, (implementer, part) in enumerate(cores)
    )


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (
            {"proc__cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3GHz\n\nprocessor : 1\nmodel name : other\n"},
            "Some CPU @ 3GHz",
        ),
        ({"proc__cpuinfo": "processor: 0\nCPU part : 0xd0b\n", "proc__device-tree__model": "Pi 5\0"}, "Pi 5"),
        ({"proc__cpuinfo": cpuinfo((0x41, 0xD0C), (0x41, 0xD0C))}, "2 x Neoverse-N1"),
        (
            {"proc__cpuinfo": cpuinfo((0x41, 0xD05), (0x41, 0xD0B), (0x41, 0xD0B)), "proc__device-tree__model": "Pi\0"},
            "Pi (2 x Cortex-A76, 1 x Cortex-A55)",
        ),
        ({"proc__cpuinfo": cpuinfo((0x41, 0xFFF))}, "CPU implementer 0x41 CPU part 0xfff"),
        ({"proc__cpuinfo": cpuinfo((0x61, 0xD0C))}, "CPU implementer 0x61 CPU part 0xd0c"),  # Apple's
        ({"proc__cpuinfo": "CPU implementer : ?\nCPU part : 0xd0c\n"}, "CPU implementer ? CPU part 0xd0c"),
    ],
)
def test_the_name_of_the_processor(tmp_path: Path, files: dict[str, str], name: str) -> None:
    assert processor_name(put(tmp_path, **files)) == name


def test_a_mac_is_asked_by_sysctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"machdep.cpu.brand_string": "Apple M3\n", "hw.model": "Mac15,3\n", "kern.hv_vmm_present": "0\n"}

    def run(command: list[str], **_: object) -> Any:
        if command[-1] not in answers:
            raise subprocess.CalledProcessError(1, command)
        return SimpleNamespace(stdout=answers[command[-1]])

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    assert processor_name(tmp_path) == "Apple M3"
    assert machine_facts(tmp_path) == {"machine": "Mac15,3", "virtual": False, "container": None}
    answers.clear()
    assert processor_name(tmp_path)
    assert machine_facts(tmp_path)["virtual"] is None


def test_frequencies_are_megahertz(tmp_path: Path) -> None:
    folder = "sys__devices__system__cpu__cpu0__cpufreq__"
    files = {"scaling_governor": "powersave\n", "energy_performance_preference": "balance_power\n"}
    files |= {"scaling_cur_freq": "1800000\n", "cpuinfo_max_freq": "4700000\n"}
    put(tmp_path, **{folder + name: text for name, text in files.items()})
    assert frequency_facts(tmp_path) == {
        "governor": "powersave",
        "energy_preference": "balance_power",
        "mhz": 1800.0,
        "mhz_max": 4700.0,
    }


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({"proc__cpuinfo": "flags : fpu hypervisor\n"}, {"machine": None, "virtual": True, "container": None}),
        (
            {
                "proc__cpuinfo": "flags : fpu sse\n",
                "sys__class__dmi__id__sys_vendor": "Framework\n",
                "sys__class__dmi__id__product_name": "Laptop 13\n",
            },
            {"machine": "Framework Laptop 13", "virtual": False, "container": None},
        ),
        (
            {"sys__class__dmi__id__sys_vendor": "QEMU\n", ".dockerenv": ""},
            {"machine": "QEMU", "virtual": True, "container": "docker"},
        ),
        ({"run__systemd__container": "podman\n"}, {"machine": None, "virtual": None, "container": "podman"}),
    ],
)
def test_what_kind_of_machine_it_is(tmp_path: Path, files: dict[str, str], facts: dict[str, Any]) -> None:
    assert machine_facts(put(tmp_path, **files)) == facts


UDEV = """I:1
E:MEMORY_ARRAY_LOCATION=System Board
E:MEMORY_DEVICE_0_TYPE=DDR5
E:MEMORY_DEVICE_0_SPEED_MTS=5600
E:MEMORY_DEVICE_0_CONFIGURED_SPEED_MTS=5200
E:MEMORY_DEVICE_1_PRESENT=0
E:MEMORY_DEVICE_2_TYPE=DDR5
E:MEMORY_DEVICE_2_SPEED_MTS=5600
"""


def test_udev_tells_everybody_how_fast_the_memory_is(tmp_path: Path) -> None:
    path = tmp_path / "run/udev/data/+dmi:id"
    path.parent.mkdir(parents=True)
    path.write_text(UDEV)
    assert memory_facts(tmp_path) == {"memory_modules": 2, "memory_type": "DDR5", "memory_mts": 5200}


def quiet_machine(**changed: object) -> dict[str, Any]:
    state = {"load_average": [0.2, 3.0, 3.0], "cores_physical": 4, "governor": "performance", "energy_preference": None}
    state |= {"on_battery": False, "virtual": True, "stolen_seconds": 5.0, "processor_seconds": 1000.0}
    state |= {"memory_bytes": 64 << 30, "memory_free": 3 << 30}
    return state | changed


def test_a_quiet_machine_has_no_warnings() -> None:
    assert warnings_about(quiet_machine()) == []
    assert warnings_about(quiet_machine(governor="powersave", energy_preference="balance_performance")) == []
    assert warnings_about({}) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"load_average": [1.25, 0.0, 0.0]},
            "Other programs are running: the load average of the last minute is 1.25 on 4 cores.",
        ),
        ({"governor": "conservative"}, "The CPU is in a power-saving mode: its frequency governor is conservative."),
        ({"energy_preference": "power"}, "The CPU is in a power-saving mode: its energy preference is power."),
        ({"on_battery": True}, "The machine is running on battery and may be slower than on mains power."),
        (
            {"stolen_seconds": 70.0},
            "This virtual machine has waited for its CPUs 7% of the time since it started (steal time).",
        ),
        (
            {"memory_free": 1 << 30},
            "Little memory is free (1.07 GB of 68.7 GB): swapping may slow models down.",
        ),
    ],
)
def test_what_spoils_a_measurement_is_said_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    assert warnings_about(quiet_machine(**changed)) == [sentence]


def test_what_happened_during_the_measurement_is_said() -> None:
    before = quiet_machine()
    assert warnings_between(before, quiet_machine(stolen_seconds=5.5, processor_seconds=1100.0)) == []
    after = quiet_machine(stolen_seconds=15.0, processor_seconds=1100.0, on_battery=True)
    assert warnings_between(before, after) == [
        "Other virtual machines took 10% of the CPU time during the measurement.",
        "The machine was unplugged during the measurement and has run on battery since then.",
    ]


def test_batteries_and_stolen_time_are_read_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", "user nice system idle iowait irq softirq steal guest guest_nice")
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(10.0, 1.0, 2.0, 80.0, 0.0, 0.0, 0.0, 7.0, 4.0, 0.0))
    monkeypatch.setattr(
        psutil, "sensors_battery", lambda: SimpleNamespace(percent=51.6, power_plugged=False), raising=False
    )
    state = system_state()
    assert (state["stolen_seconds"], state["processor_seconds"]) == (7.0, 104.0 - 4.0)
    assert (state["on_battery"], state["battery_percent"]) == (True, 52)
    monkeypatch.setattr(
        psutil, "sensors_battery", lambda: SimpleNamespace(percent=99, power_plugged=None), raising=False
    )
    assert system_state()["on_battery"] is None
