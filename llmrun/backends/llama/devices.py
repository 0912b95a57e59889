"""Lists the devices that llama.cpp would use, and adds RPC servers to them, by calling its own library."""

from __future__ import annotations

import ctypes
from typing import Any

_RPC = b"RPC"
_GPU, _INTEGRATED = 1, 2  # ggml device types
_WITHOUT_GPUS = frozenset({"CPU", "BLAS", "RPC", "ZenDNN", "zDNN"})  # backends that never have a GPU of this machine


def usable_gpus(ggml: Any) -> list[dict[str, Any]]:
    """Return the `description`, `free` bytes and `total` bytes of each GPU that llama.cpp would use, in its order.

    Devices of RPC servers count as GPUs and come first. Their description is the server's address.

    ggml  a ctypes library with ggml's functions

    This follows llama.cpp's rules: integrated GPUs are used only if there are no others, and a device that is listed by
    two ggml backends (such as CUDA and Vulkan) counts once. llama.cpp recognizes such a device by its bus address. We
    compare descriptions instead, which is simpler and can at worst make the list too short.
    """
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    for name in ("ggml_backend_dev_get", "ggml_backend_dev_backend_reg"):
        getattr(ggml, name).restype = ctypes.c_void_p
    ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    ggml.ggml_backend_reg_name.restype = ctypes.c_char_p
    remote: list[dict[str, Any]] = []
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {_GPU: [], _INTEGRATED: []}
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        kind = ggml.ggml_backend_dev_type(device)
        if kind not in found:
            continue
        backend = ggml.ggml_backend_dev_backend_reg(device)
        description = ggml.ggml_backend_dev_description(device).decode(errors="replace")
        is_remote = ggml.ggml_backend_reg_name(ctypes.c_void_p(backend)) == _RPC
        if not is_remote and any(
            other != backend and known["description"] == description for other, known in found[kind]
        ):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        gpu = {"description": description, "free": free.value, "total": total.value}
        if is_remote:
            remote.append(gpu)
        else:
            found[kind].append((backend, gpu))
    chosen = found[_GPU] or [pair for pair in found[_INTEGRATED] if pair[0] == found[_INTEGRATED][0][0]]
    return [*remote, *(gpu for _, gpu in chosen)]


def supports_gpus(ggml: Any) -> bool:
    """Return whether this build of llama.cpp can use GPUs, even if this machine has none or hides them.

    llama.cpp's own answer, `llama_supports_gpu_offload`, is true only if a GPU is found or the build has RPC.
    """
    if vulkan_starts(ggml) is not None:
        return True
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    ggml.ggml_backend_reg_get.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_name.restype = ctypes.c_char_p
    for index in range(ggml.ggml_backend_reg_count()):
        backend = ctypes.c_void_p(ggml.ggml_backend_reg_get(ctypes.c_size_t(index)))
        if ggml.ggml_backend_reg_name(backend).decode(errors="replace") not in _WITHOUT_GPUS:
            return True
    return False


def vulkan_starts(ggml: Any) -> bool | None:
    """Return whether Vulkan works on this machine, or None if this build of llama.cpp does not use it.

    If there is no driver, llama.cpp does not list its Vulkan backend, but the library still has its functions.
    """
    if not hasattr(ggml, "ggml_backend_vk_reg"):
        return None
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    return ggml.ggml_backend_reg_by_name(b"Vulkan") is not None


def supports_rpc(ggml: Any) -> bool:
    """Return whether this build of llama.cpp can use RPC servers."""
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    return ggml.ggml_backend_reg_by_name(_RPC) is not None


def add_rpc_server(ggml: Any, address: str) -> int:
    """Connect to an RPC server, and return the number of its devices, which llama.cpp will use from now on.

    The process aborts if there is no server or if it has another version, and waits for as long as the server does.
    """
    for name in ("ggml_backend_reg_by_name", "ggml_backend_reg_get_proc_address"):
        getattr(ggml, name).restype = ctypes.c_void_p
    backend = ctypes.c_void_p(ggml.ggml_backend_reg_by_name(_RPC))
    function = ggml.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
    added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(function)(address.encode())
    if added is None:
        return 0
    ggml.ggml_backend_register(ctypes.c_void_p(added))
    ggml.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    count: int = ggml.ggml_backend_reg_dev_count(ctypes.c_void_p(added))
    return count
