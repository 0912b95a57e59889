"""Queries NVIDIA's driver for its GPUs through NVML, without running anything on the GPUs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """A GPU as reported by NVIDIA's driver. Memory sizes are 0 if unknown (MIG slices, shared memory)."""

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
