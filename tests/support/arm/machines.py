"""Emulated Arm machines: QEMU, a root with Debian's Python and libraries, and /proc/cpuinfo of a real processor.

`scripts/test_arm` unpacks the root in .venv-arm-python and the libraries in .venv-arm. If a file exists in a machine's
folder, emulated programs see it instead of the file with the same path on this machine. The programs that they start
are not emulated, except for the machine's Python, which is a script that starts QEMU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ARM = ROOT / ".venv-arm"
_DEBIAN = ROOT / ".venv-arm-python"
_TIMEOUT_S = 3600.0
HOST_PYTHON = "TESTS_HOST_PYTHON"  # the environment variable with the Python that runs outside the emulator

_OLD = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_DOT = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
_I8MM = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb dcpodp sve2 sveaes svepmull svebitperm svesha3 "
    "svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 dgh bti"
)


@dataclass(frozen=True)
class Processor:
    """A processor: its name in QEMU, its features and part number in Linux, and the level that it should use."""

    qemu: str
    features: str
    part: str
    level: str


PROCESSORS = {
    # Raspberry Pi 4
    "cortex-a72": Processor("cortex-a72", _OLD, "0xd08", "portable"),
    # Raspberry Pi 5. QEMU emulates a slightly older revision.
    "cortex-a76": Processor("cortex-a76", _DOT, "0xd0b", "neondot"),
    # Graviton 4, with SVE vectors of 16 bytes. QEMU 7.2 has no such processor, but all of its instructions.
    "neoverse-v2": Processor("max,sve-max-vq=1", _I8MM, "0xd4f", "neoni8mm"),
}


def python_of(name: str) -> Path:
    """Return the Python of an emulated machine."""
    processor, folder = PROCESSORS[name], ARM / name
    python = folder / "python"
    if not python.exists():
        (folder / "proc").mkdir(parents=True, exist_ok=True)
        for part in ("etc", "lib", "usr"):
            (folder / part).symlink_to(_DEBIAN / part)
        (folder / "proc" / "cpuinfo").write_text(_cpuinfo(processor), encoding="utf-8")
        program = _DEBIAN / "usr" / "bin" / "python3.11"
        python.write_text(
            f'#!/bin/sh\nexec qemu-aarch64-static -0 "$0" -cpu {processor.qemu} -L {folder} {program} "$@"\n',
            encoding="utf-8",
        )
        python.chmod(0o755)
    return python


def _cpuinfo(processor: Processor) -> str:
    fields = {
        "BogoMIPS": "100.00",
        "Features": processor.features,
        "CPU implementer": "0x41",
        "CPU architecture": "8",
        "CPU variant": "0x0",
        "CPU part": processor.part,
        "CPU revision": "1",
    }
    return "".join(
        f"processor\t: {number}\n" + "".join(f"{name}\t: {value}\n" for name, value in fields.items()) + "\n"
        for number in range(os.cpu_count() or 1)
    )


def arm_home() -> dict[str, str]:
    """Return the environment variable with which the emulated Python finds its standard library."""
    return {"PYTHONHOME": str(_DEBIAN / "usr")}


def run_on(name: str, *arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` on an emulated machine, and `text` as its input."""
    paths = arm_home() | {"PYTHONPATH": f"{ROOT}:{ARM / 'libraries'}"}
    return subprocess.run(
        [str(python_of(name)), *arguments],
        input=text,
        env=os.environ | paths | {HOST_PYTHON: sys.executable} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
