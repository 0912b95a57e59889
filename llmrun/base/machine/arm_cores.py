"""The names of Arm's processor cores, which Linux reports only as numbers. Cores of other companies are not listed."""

from __future__ import annotations

from collections import Counter

_ARM_LIMITED = 0x41  # a value of "CPU implementer" in /proc/cpuinfo

# Values of "CPU part", as in Arm's reference manuals (the field PartNum of the register MIDR_EL1).
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
            implementer = _number(value)
        elif name == "CPU part" and implementer == _ARM_LIMITED:
            parts.append(_number(value))
    known = sorted(Counter(parts).items(), reverse=True)  # later parts are usually faster
    if not known or any(part not in _PARTS for part, _ in known):
        return ""
    return ", ".join(f"{count} x {_PARTS[part]}" for part, count in known)


def _number(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1
