"""Lists the GPUs of this machine and their drivers. No code is run on the GPUs.

NVIDIA's driver reports its GPUs through NVML. Other GPUs are found on the PCI bus, where Linux lists the vendor and
driver of each device. Macs with Apple silicon have a built-in GPU.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.machine.processor import number_of, processor_name, text_of


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """A GPU as reported by NVIDIA's driver. Memory sizes are 0 if unknown, as for MIG slices and shared memory."""

    name: str
    driver: str
    memory: int
    memory_free: int


def nvidia_cards() -> list[NvidiaCard]:
    """Return the NVIDIA GPUs and their driver version, or an empty list if there is no working driver.

    If a query for one GPU fails, returns only the GPUs before it.
    """
    import pynvml

    cards: list[NvidiaCard] = []
    with contextlib.suppress(pynvml.NVMLError, OSError):
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = free = 0
            with contextlib.suppress(pynvml.NVMLError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(device)
                total, free = int(memory.total), int(memory.free)
            cards.append(NvidiaCard(str(pynvml.nvmlDeviceGetName(device)), driver, total, free))
    return cards


_DISPLAY_CLASS = "0x03"  # the PCI class of VGA, 3D and display controllers
_ACCELERATOR_CLASS = "0x12"
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_NVIDIA = "NVIDIA"
_RESERVED = "vfio-pci"  # this driver passes the GPU through to a virtual machine


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `driver` is the driver's name and version, or "" if there is no driver.

    Memory sizes are 0 if unknown.
    """

    maker: str  # "NVIDIA", "AMD", "Intel" or "Apple"
    name: str
    driver: str
    memory: int = 0
    memory_free: int = 0

    @property
    def is_usable(self) -> bool:
        """True if the loaded driver can run models. NVIDIA GPUs require NVIDIA's driver, not nouveau."""
        name = self.driver.removeprefix("driver ")
        if self.maker == _NVIDIA:
            return name[:1].isdecimal() or name == "nvidia"
        return name not in ("", _RESERVED)


def gpus(root: Path = Path("/")) -> list[Gpu]:
    """Return every GPU in the system that could run models."""
    found = [Gpu(_NVIDIA, card.name, f"driver {card.driver}", card.memory, card.memory_free) for card in nvidia_cards()]
    found += [gpu for gpu in _pci_gpus(root) if not (found and gpu.maker == _NVIDIA)]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found.append(Gpu("Apple", processor_name(root), "Metal"))
    return found


def _pci_gpus(root: Path) -> list[Gpu]:
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        maker = _MAKERS.get(text_of(device / "vendor") or "")
        kind = text_of(device / "class") or ""
        if maker is None or not (
            kind.startswith(_DISPLAY_CLASS) or (kind.startswith(_ACCELERATOR_CLASS) and maker == "AMD")
        ):
            continue
        driver, total = device / "driver", number_of(device / "mem_info_vram_total") or 0
        name = text_of(device / "product_name") or f"{maker} GPU {text_of(device / 'device') or ''}".strip()
        found.append(
            Gpu(
                maker,
                name,
                f"driver {driver.resolve().name}" if driver.exists() else "",
                total,
                max(0, total - (number_of(device / "mem_info_vram_used") or 0)),
            )
        )
    return found
