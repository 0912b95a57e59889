"""Facts about the processor: its name, its frequency, and whether it is virtual.

`root` is the directory that contains Linux's system files. Other systems are queried through their own interfaces.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from llmrun.base.machine.arm_cores import arm_cores
from llmrun.base.machine.system_files import text_of

_POLICY = "sys/devices/system/cpu/cpu0/cpufreq"
_VIRTUAL_VENDORS = ("QEMU", "VMware", "Xen", "Parallels", "innotek", "Google")  # used on CPUs without a hypervisor flag


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's model name. If the system does not report one, return the best available description."""
    known = _cpuinfo(root)
    return (
        known.get("model name")
        or _board_and_cores(root)
        or _name_elsewhere()
        or " ".join(f"{key} {known[key]}" for key in ("CPU implementer", "CPU part") if key in known)
        or platform.processor()
        or platform.machine()
    )


def _board_and_cores(root: Path) -> str:
    board = text_of(root / "proc/device-tree/model") or ""  # for example "Raspberry Pi 5 Model B Rev 1.0"
    cores = arm_cores(text_of(root / "proc/cpuinfo") or "")
    return f"{board} ({cores})" if board and cores else board or cores


def _name_elsewhere() -> str | None:
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string")
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except OSError:
            return None
    return None


def frequency_facts(root: Path = Path("/")) -> dict[str, str | float | None]:
    """Return the frequency policy and the frequencies of the first core. Values that are unknown are None."""
    return {
        "governor": text_of(root / _POLICY / "scaling_governor"),
        "energy_preference": text_of(root / _POLICY / "energy_performance_preference"),
        "mhz": _megahertz(root / _POLICY / "scaling_cur_freq") or _number(_cpuinfo(root).get("cpu MHz")),
        "mhz_max": _megahertz(root / _POLICY / "cpuinfo_max_freq"),
    }


def machine_facts(root: Path = Path("/")) -> dict[str, str | bool | None]:
    """Return `machine` (the vendor and model), `virtual` (whether this is a virtual machine), and `container`.

    `container` is the kind of container, or None outside containers.
    """
    dmi = root / "sys/class/dmi/id"
    vendor = text_of(dmi / "sys_vendor")
    words = [word for word in (vendor, text_of(dmi / "product_name")) if word]
    return {
        "machine": " ".join(words) or sysctl("hw.model"),
        "virtual": _is_virtual(_cpuinfo(root), vendor),
        "container": _container(root),
    }


def _is_virtual(known: Mapping[str, str], vendor: str | None) -> bool | None:
    if "flags" in known:  # on x86, virtual machines have the CPU flag "hypervisor"
        return "hypervisor" in known["flags"].split()
    if vendor is not None:
        return vendor.startswith(_VIRTUAL_VENDORS)
    present = sysctl("kern.hv_vmm_present")
    return None if present is None else present == "1"


def _container(root: Path) -> str | None:
    for path, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / path).exists():
            return name
    named = text_of(root / "run/systemd/container")
    if named is None and (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    return named


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    known: dict[str, str] = {}
    for line in (text_of(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if value.strip():
            known.setdefault(name.strip(), value.strip())
    return known


def sysctl(name: str) -> str | None:
    """Return a value that the system's `sysctl` reports, or None if it is unknown or this is not macOS."""
    if sys.platform != "darwin":
        return None
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _megahertz(path: Path) -> float | None:
    kilohertz = _number(text_of(path))
    return kilohertz / 1000 if kilohertz else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
