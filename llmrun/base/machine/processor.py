"""Facts about the processor: its name, its frequency, its optional instructions, and whether it is virtual.

Every command runs `missing_instructions` first, to check for the instructions that NumPy's packages require
(x86-64-v2). This module must therefore not import anything slow.

A `root` argument is the directory that contains Linux's system files. Other systems are queried through their own
interfaces. Linux reports the cores of Arm processors only as numbers, so this module lists the names of Arm's own
cores.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the driver is loaded, working or not


def text_of(path: Path) -> str | None:
    """Return a system file's text without surrounding whitespace and NULs, or None if it is empty or unreadable."""
    try:
        return path.read_text("utf-8", "replace").strip(" \t\n\0") or None
    except OSError:
        return None


def boot_id() -> str:
    """Return a text that changes whenever this computer starts, or "" if the system provides none."""
    return text_of(_BOOT_ID) or sysctl("kern.bootsessionuuid") or ""


def number_of(path: Path) -> int | None:
    """Return the number in a file, or None if the file contains other text, such as "max", or cannot be read."""
    text = text_of(path) or ""
    return int(text) if text.isdecimal() and text.isascii() else None


_ARM_LIMITED = 0x41  # Arm's value of "CPU implementer" in /proc/cpuinfo

# The values of "CPU part" are in Arm's reference manuals (the field PartNum of the register MIDR_EL1).
_PARTS = {
    0xD02: "Cortex-A34",
    0xD03: "Cortex-A53",
    0xD04: "Cortex-A35",
    0xD05: "Cortex-A55",
    0xD07: "Cortex-A57",
    0xD08: "Cortex-A72",
    0xD09: "Cortex-A73",
    0xD0A: "Cortex-A75",
    0xD0B: "Cortex-A76",
    0xD0C: "Neoverse-N1",
    0xD0D: "Cortex-A77",
    0xD0E: "Cortex-A76AE",
    0xD40: "Neoverse-V1",
    0xD41: "Cortex-A78",
    0xD42: "Cortex-A78AE",
    0xD44: "Cortex-X1",
    0xD46: "Cortex-A510",
    0xD47: "Cortex-A710",
    0xD48: "Cortex-X2",
    0xD49: "Neoverse-N2",
    0xD4B: "Cortex-A78C",
    0xD4D: "Cortex-A715",
    0xD4E: "Cortex-X3",
    0xD4F: "Neoverse-V2",
    0xD80: "Cortex-A520",
    0xD81: "Cortex-A720",
    0xD82: "Cortex-X4",
    0xD84: "Neoverse-V3",
    0xD85: "Cortex-X925",
    0xD87: "Cortex-A725",
    0xD8E: "Neoverse-N3",
}


def arm_cores(cpuinfo: str) -> str:
    """Describe the cores in the text of /proc/cpuinfo, as in "4 x Cortex-A76, 4 x Cortex-A55", or return ""."""
    parts: list[int] = []
    implementer = None
    for line in cpuinfo.splitlines():
        name, _, value = (word.strip() for word in line.partition(":"))
        if name == "CPU implementer":
            implementer = _hexadecimal(value)
        elif name == "CPU part" and implementer == _ARM_LIMITED:
            parts.append(_hexadecimal(value))
    known = sorted(Counter(parts).items(), reverse=True)  # higher part numbers are usually faster
    if not known or any(part not in _PARTS for part, _ in known):
        return ""
    return ", ".join(f"{count} x {_PARTS[part]}" for part, count in known)


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1


_POLICY = "sys/devices/system/cpu/cpu0/cpufreq"
_VIRTUAL_VENDORS = ("QEMU", "VMware", "Xen", "Parallels", "innotek", "Google")  # for CPUs without a hypervisor flag


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's model name. If the system reports no name, return the best available description."""
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
    """Return the frequency policy and the frequencies of the first core. Unknown values are None."""
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
    """Return a value that the system's `sysctl` reports, or None for unknown values and on systems other than macOS."""
    if sys.platform != "darwin":
        return None
    import subprocess

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


# Each value is an entry of Linux's auxiliary vector (AT_HWCAP or AT_HWCAP2) and the number of a bit in the entry.
_LINUX = {"neon": (16, 1), "dotprod": (16, 20), "i8mm": (26, 13)}
_WINDOWS_DOT = 43  # PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
_MACOS = {"neon": "hw.optional.neon", "dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}


@functools.cache  # on macOS, this function starts child processes
def arm_features() -> dict[str, bool]:
    """Return whether the processor has each feature, or {} on systems that report none.

    If a processor has several kinds of cores, Linux reports only the features that all of them have. Windows reports
    no matrix products.
    """
    if sys.platform == "darwin":
        return {name: sysctl(key) == "1" for name, key in _MACOS.items()}
    if sys.platform == "win32":
        has_feature = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return {"neon": True, "dotprod": bool(has_feature(_WINDOWS_DOT)), "i8mm": False}
    if sys.platform != "linux":
        return {}
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name: bool(read(entry) >> bit & 1) for name, (entry, bit) in _LINUX.items()}


_NEEDED = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")  # the names in Linux
_FIRST_PROCESSOR = 4096  # bytes to read for the first processor; on large machines, the whole file is long


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the processor's flags, or an empty set if the flags are unknown, as on Arm and outside Linux.

    root  the directory that contains Linux's system files
    """
    try:
        with (root / "proc/cpuinfo").open("rb") as file:
            described = re.search(rb"^flags\s*:(.*)\n", file.read(_FIRST_PROCESSOR), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(described[1].decode("ascii", "replace").split() if described else ())


def missing_instructions(root: Path = Path("/")) -> list[str]:
    """Return the required instructions that this processor lacks, or [] if its flags are unknown, as on Arm."""
    present = processor_flags(root)
    return [name for name in _NEEDED if name not in present] if present else []
