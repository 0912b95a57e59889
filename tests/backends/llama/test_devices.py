"""Tests of which devices llama.cpp would use for a model's layers, and of adding RPC servers to them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from llmrun.backends.llama.rpc_devices import add_rpc_server, supports_gpus, supports_rpc, usable_gpus, vulkan_starts

CPU, GPU, INTEGRATED, ACCELERATOR = 0, 1, 2, 3
CUDA, VULKAN, RPC = 0x1000, 0x2000, 0x3000  # addresses of ggml's registrations
NAMES = {CUDA: b"CUDA", VULKAN: b"Vulkan", RPC: b"RPC"}
SERVER = "10.0.0.2:50052"


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
        self.ggml_backend_reg_name = _Function(lambda backend: NAMES.get(backend.value, b"CPU"))
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
        ([(GPU, CUDA, "A", 10), (GPU, RPC, SERVER, 5)], [(SERVER, 5), ("A", 10)]),
        ([(INTEGRATED, VULKAN, "Iris", 5), (GPU, RPC, SERVER, 7)], [(SERVER, 7), ("Iris", 5)]),
        ([(GPU, RPC, SERVER, 7), (GPU, RPC, SERVER, 8)], [(SERVER, 7), (SERVER, 8)]),
    ],
    ids=[
        "none",
        "two alike",
        "integrated beside another",
        "seen twice",
        "integrated seen twice",
        "no UTF-8",
        "a server before a GPU",
        "a server beside an integrated one",
        "two on one server",
    ],
)
def test_the_gpus_that_llama_cpp_would_use(
    devices: list[tuple[int, int, str, int]], expected: list[tuple[str, int]]
) -> None:
    found = usable_gpus(FakeGgml(*devices))
    assert [(gpu["description"], gpu["free"]) for gpu in found] == expected
    assert all(gpu["total"] == 100 for gpu in found)


class FakeBuild:
    """A stand-in for ggml's list of the backends that were built in, whether or not they have devices."""

    def __init__(self, *names: str) -> None:
        self.ggml_backend_reg_count = _Function(lambda: len(names))
        self.ggml_backend_reg_get = _Function(lambda index: index.value + 1)
        self.ggml_backend_reg_name = _Function(lambda backend: names[backend.value - 1].encode())
        self.ggml_backend_reg_by_name = _Function(lambda name: 1 if name.decode() in names else None)


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        (["CPU"], False),
        (["BLAS", "CPU"], False),
        (["RPC", "CPU"], False),
        (["CUDA", "CPU"], True),
        (["ROCm", "RPC", "CPU"], True),
        (["MTL", "BLAS", "CPU"], True),
        (["Vulkan", "CPU"], True),
    ],
)
def test_a_build_supports_gpus_even_if_there_are_none(backends: list[str], expected: bool) -> None:
    assert supports_gpus(FakeBuild(*backends)) is expected


def test_a_vulkan_build_without_a_driver_supports_gpus() -> None:
    """Without a driver, ggml does not register its Vulkan backend."""
    build = FakeBuild("CPU")
    build.ggml_backend_vk_reg = _Function(lambda: None)  # type: ignore[attr-defined]
    assert (supports_gpus(build), vulkan_starts(build)) == (True, False)


def test_whether_vulkan_starts_is_known() -> None:
    assert vulkan_starts(FakeBuild("CPU")) is None
    assert vulkan_starts(FakeBuild("CPU", "Vulkan")) is True  # loaded at run time from a separate file
    build = FakeBuild("CPU", "Vulkan")
    build.ggml_backend_vk_reg = _Function(lambda: None)  # type: ignore[attr-defined]
    assert vulkan_starts(build) is True


class FakeRpc:
    """A stand-in for the functions of ggml that add RPC servers. It records what was added and registered."""

    def __init__(self, *, has_rpc: bool = True, devices: int = 2) -> None:
        self.added: list[bytes] = []
        self.registered: list[int] = []

        def add(address: bytes) -> int | None:
            self.added.append(address)
            return 0x5000 if devices else None

        self._add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)
        address = ctypes.cast(self._add, ctypes.c_void_p).value
        self.ggml_backend_reg_by_name = _Function(lambda name: RPC if has_rpc and name == b"RPC" else None)
        self.ggml_backend_reg_get_proc_address = _Function(
            lambda backend, name: {(RPC, b"ggml_backend_rpc_add_server"): address}[(backend.value, name)]
        )
        self.ggml_backend_register = _Function(lambda backend: self.registered.append(backend.value))
        self.ggml_backend_reg_dev_count = _Function(lambda backend: devices)


def test_a_server_is_added_and_registered() -> None:
    """In current versions of ggml, `ggml_backend_rpc_add_server` returns a backend that the caller must register."""
    ggml = FakeRpc()
    assert supports_rpc(ggml)
    assert add_rpc_server(ggml, SERVER) == 2
    assert (ggml.added, ggml.registered) == ([SERVER.encode()], [0x5000])


def test_a_server_without_devices_is_not_registered() -> None:
    ggml = FakeRpc(devices=0)
    assert add_rpc_server(ggml, SERVER) == 0
    assert ggml.registered == []


def test_a_build_without_rpc_says_so() -> None:
    assert not supports_rpc(FakeRpc(has_rpc=False))
