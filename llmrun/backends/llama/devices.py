"""Lists the GPUs that llama.cpp would use, by calling its own library."""

from __future__ import annotations

import ctypes
from typing import Any

_GPU, _INTEGRATED = 1, 2  # ggml device types


def usable_gpus(ggml: Any) -> list[dict[str, Any]]:
    """Return the `description`, `free` bytes and `total` bytes of each GPU that llama.cpp would use.

    ggml  a ctypes library with ggml's functions

    This follows llama.cpp's rules: integrated GPUs are used only if there are no others, and a device that is listed by
    two ggml backends (such as CUDA and Vulkan) counts once. llama.cpp recognizes such a device by its bus address. We
    compare descriptions instead, which is simpler and can at worst make the list too short.
    """
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    for name in ("ggml_backend_dev_get", "ggml_backend_dev_backend_reg"):
        getattr(ggml, name).restype = ctypes.c_void_p
    ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {_GPU: [], _INTEGRATED: []}
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        kind = ggml.ggml_backend_dev_type(device)
        if kind not in found:
            continue
        backend = ggml.ggml_backend_dev_backend_reg(device)
        description = ggml.ggml_backend_dev_description(device).decode(errors="replace")
        if any(other != backend and known["description"] == description for other, known in found[kind]):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found[kind].append((backend, {"description": description, "free": free.value, "total": total.value}))
    chosen = found[_GPU] or [pair for pair in found[_INTEGRATED] if pair[0] == found[_INTEGRATED][0][0]]
    return [gpu for _, gpu in chosen]
