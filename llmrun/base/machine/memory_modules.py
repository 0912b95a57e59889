"""Reads the type and speed of the memory modules from the firmware's SMBIOS tables (structures of type 17).

Only root may read these tables. Where udev is installed, it reads them at boot and makes the values available to all
users.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.machine.system_files import text_of

_UDEV = re.compile(r"^E:MEMORY_DEVICE_(\d+)_([A-Z_]+)=(.*)$", re.MULTILINE)
_MEMORY_DEVICE = 17
_END = 127
_KINDS = {24: "DDR3", 26: "DDR4", 27: "LPDDR", 28: "LPDDR2", 29: "LPDDR3", 30: "LPDDR4", 34: "DDR5", 35: "LPDDR5"}


@dataclass(frozen=True, slots=True)
class Module:
    """One memory module. `speed` is the configured speed in millions of transfers per second, or 0 if unknown."""

    kind: str  # for example "DDR5"; empty if unknown
    speed: int


def memory_facts(root: Path = Path("/")) -> dict[str, str | int | None]:
    """Return `memory_modules` (a count), `memory_type` and `memory_mts` (the slowest speed), each None if unknown."""
    modules = _udev_modules(text_of(root / "run/udev/data/+dmi:id") or "") or _smbios_modules(root)
    return {
        "memory_modules": len(modules) or None,
        "memory_type": "/".join(sorted({module.kind for module in modules if module.kind})) or None,
        "memory_mts": min((module.speed for module in modules if module.speed), default=None),
    }


def _udev_modules(text: str) -> list[Module]:
    slots: dict[str, dict[str, str]] = {}
    for slot, name, value in _UDEV.findall(text):
        slots.setdefault(slot, {})[name] = value
    return [
        Module(
            slot.get("TYPE", ""),
            _integer(slot.get("CONFIGURED_SPEED_MTS", "")) or _integer(slot.get("SPEED_MTS", "")),
        )
        for slot in slots.values()
        if slot.get("PRESENT") != "0"
    ]


def _integer(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _smbios_modules(root: Path) -> list[Module]:
    try:
        table = (root / "sys/firmware/dmi/tables/DMI").read_bytes()
    except OSError:
        return []
    modules, start = [], 0
    while start + 4 <= len(table):
        kind, length = table[start], table[start + 1]
        body = table[start : start + length]
        if kind == _END or len(body) != length or length < 4:
            break
        if kind == _MEMORY_DEVICE and length >= 0x17 and struct.unpack_from("<H", body, 0x0C)[0]:  # size 0: empty slot
            (rated,) = struct.unpack_from("<H", body, 0x15)
            configured = struct.unpack_from("<H", body, 0x20)[0] if length >= 0x22 else 0
            modules.append(Module(_KINDS.get(body[0x12], ""), _known(configured) or _known(rated)))
        start = table.find(b"\0\0", start + length) + 2  # an empty string ends the structure's strings
        if start < 2:
            break
    return modules


def _known(speed: int) -> int:
    return 0 if speed == 0xFFFF else speed
