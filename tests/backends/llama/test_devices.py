"""Tests of which GPUs llama.cpp would use for a model's layers."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.backends.llama.devices import usable_gpus

CPU, GPU, INTEGRATED, ACCELERATOR = 0, 1, 2, 3
CUDA, VULKAN = 0x1000, 0x2000  # addresses of ggml's registrations


class _Function:
    """A stand-in for a ctypes function, which is callable and has attributes."""

    restype: Any = None

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class FakeGgml:
    """A stand-in for ggml's functions, over rows of (type, registration, description, free)."""

    def __init__(self, *devices: tuple[int, int, str, int]) -> None:
        def memory(device: Any, free: Any, total: Any) -> None:
            free._obj.value = devices[device.value - 1][3]
            total._obj.value = 100

        self.ggml_backend_dev_count = _Function(lambda: len(devices))
        self.ggml_backend_dev_get = _Function(lambda index: index.value + 1)
        self.ggml_backend_dev_type = _Function(lambda device: devices[device.value - 1][0])
        self.ggml_backend_dev_backend_reg = _Function(lambda device: devices[device.value - 1][1])
        self.ggml_backend_dev_description = _Function(lambda device: devices[device.value - 1][2].encode("latin-1"))
        self.ggml_backend_dev_memory = _Function(memory)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([(CPU, 1, "Xeon", 9), (ACCELERATOR, 1, "BLAS", 9)], []),
        ([(GPU, CUDA, "A", 10), (GPU, CUDA, "A", 20), (CPU, 1, "Xeon", 9)], [("A", 10), ("A", 20)]),
        ([(INTEGRATED, VULKAN, "Iris", 5), (GPU, CUDA, "A", 10)], [("A", 10)]),
        ([(GPU, CUDA, "A", 10), (GPU, VULKAN, "A", 11), (GPU, VULKAN, "B", 12)], [("A", 10), ("B", 12)]),
        ([(INTEGRATED, CUDA, "Iris", 5), (INTEGRATED, VULKAN, "Iris (Mesa)", 6)], [("Iris", 5)]),
        ([(GPU, CUDA, "\xff", 1)], [("�", 1)]),
    ],
    ids=["none", "two alike", "integrated beside another", "seen twice", "integrated seen twice", "no UTF-8"],
)
def test_the_gpus_that_llama_cpp_would_use(
    devices: list[tuple[int, int, str, int]], expected: list[tuple[str, int]]
) -> None:
    found = usable_gpus(FakeGgml(*devices))
    assert [(gpu["description"], gpu["free"]) for gpu in found] == expected
    assert all(gpu["total"] == 100 for gpu in found)
