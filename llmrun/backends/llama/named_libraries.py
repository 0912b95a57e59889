"""Checks the libraries in the folder LLAMA_CPP_LIB_PATH against llama-cpp-python, and loads their ggml backends.

llama-cpp-python passes llama.cpp's structures by value, and llama.cpp often adds a field. A library with another layout
would misread its settings or overwrite memory. The process that runs llama.cpp imports this module only if the variable
is set, because llama-cpp-python's own libraries always match.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrun.backends.llama.messages import WrongLibrary

_ROOM = 4096  # bytes, many times the size of the largest structure
_ALIGNMENT = 8
_EMPTY, _FULL = 0x00, 0xFF

# Functions that return a structure, their arguments, and fields of the structure. The values have been the same in
# llama.cpp for years, and most are not zero, so another value at the place of such a field means that the field moved.
_STRUCTURES: tuple[tuple[str, str, tuple[Any, ...], Mapping[str, int]], ...] = (
    (
        "llama_model_params",
        "llama_model_default_params",
        (),
        {"split_mode": 1, "vocab_only": 0, "check_tensors": 0, "use_extra_bufts": 1},
    ),
    (
        "llama_context_params",
        "llama_context_default_params",
        (),
        {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "pooling_type": -1}
        | {"type_k": 1, "type_v": 1, "embeddings": 0, "offload_kqv": 1, "op_offload": 1},
    ),
    (
        "llama_model_quantize_params",
        "llama_model_quantize_default_params",
        (),
        {"allow_requantize": 0, "quantize_output_tensor": 1, "only_copy": 0, "pure": 0},
    ),
    ("llama_batch", "llama_batch_get_one", (None, 1), {"n_tokens": 1}),
)


_MODULES = {"llama": "llama_cpp", "mtmd": "mtmd_cpp"}  # the declarations of each library
_MTMD_STRUCTURE = (
    "mtmd_context_params",
    "mtmd_context_params_default",
    (),
    {"n_threads": 4, "flash_attn_type": -1, "warmup": 1, "image_min_tokens": -1, "image_max_tokens": -1},
)


class _Raw(ctypes.Structure):
    """The result of a function that returns a structure of unknown size."""

    _fields_ = (("bytes", ctypes.c_uint8 * _ROOM),)


def checked_declarations(folder: str) -> Any:
    """Import llama-cpp-python's declarations for the libraries in the folder, and load the ggml backends there.

    Raises WrongLibrary if the libraries do not match the declarations.
    """
    llama = _imported("llama", r"(?:llama|ggml)_\w+", folder)
    for structure, function, arguments, fields in _STRUCTURES:
        if why := _difference(getattr(llama, structure), llama._lib, function, arguments, fields):
            raise WrongLibrary(f"{structure} has {why} in {build_words(llama._lib)}")
    _load_backends(llama._lib, folder)
    return llama


def checked_mtmd(folder: str) -> Any:
    """Import llama-cpp-python's declarations of libmtmd for the library in the folder, like `checked_declarations`."""
    try:
        mtmd = _imported("mtmd", r"mtmd_\w+", folder)
    except FileNotFoundError as error:
        raise WrongLibrary("libmtmd, which encodes images, is missing") from error
    structure, function, arguments, fields = _MTMD_STRUCTURE
    if why := _difference(getattr(mtmd, structure), mtmd._libmtmd, function, arguments, fields):
        raise WrongLibrary(f"{structure} has {why} in libmtmd")
    return mtmd


def _imported(name: str, functions: str, folder: str) -> Any:
    """Import the declarations of a library. Raises WrongLibrary if the library lacks a function.

    functions  the pattern of the names of functions
    """
    try:
        return importlib.import_module(f"llama_cpp.{_MODULES[name]}")
    except AttributeError as error:  # the import looks up every function
        names = re.findall(functions, str(error))
        if not names:
            raise
        extensions = importlib.import_module("llama_cpp._ctypes_extensions")
        library = extensions.load_shared_library(name, Path(folder))
        raise WrongLibrary(f"{names[-1]} is missing in {build_words(library)}") from error


def build_words(library: Any) -> str:
    """Return the version and commit of a llama.cpp library, as far as the library contains them."""
    version, commit = (_text(library, name) for name in ("llama_version", "ggml_commit"))
    words = f"llama.cpp {version}" if version else "an old llama.cpp"
    return words if commit in ("", "unknown") else f"{words}, commit {commit.removesuffix('-dirty')}"


def _text(library: Any, name: str) -> str:
    """Call a function without arguments that returns text. Returns "" if the library does not have the function."""
    if not hasattr(library, name):
        return ""
    return (ctypes.CFUNCTYPE(ctypes.c_char_p)((name, library))() or b"").decode(errors="replace")


def _difference(
    structure: type[ctypes.Structure],
    library: Any,
    function: str,
    arguments: tuple[Any, ...],
    fields: Mapping[str, int],
) -> str:
    """Return how the library's structure differs from the declared one, or "" if no difference is found."""
    data, size = _returned(library, function, arguments)
    declared = ctypes.sizeof(structure)
    if size is not None and size != declared:
        return f"{size} bytes instead of {declared}"
    value = structure.from_buffer_copy(data)
    moved = [name for name, expected in fields.items() if getattr(value, name, expected) != expected]
    return f"another layout ({', '.join(moved)})" if moved else ""


def _returned(library: Any, name: str, arguments: tuple[Any, ...]) -> tuple[bytes, int | None]:
    """Call a function that returns a structure. Return the structure's memory and its size, or None if not known.

    The function writes to a large buffer, because its structure may be larger than the declared one. On x86-64, the
    buffer's address is the first argument of such a function. Bytes that differ from two different fillings were
    written. Other processors have no such argument, so the size cannot be measured there.
    """
    kinds = [ctypes.c_void_p, ctypes.c_int32][: len(arguments)]
    if platform.machine() not in ("x86_64", "AMD64"):
        returned: _Raw = ctypes.CFUNCTYPE(_Raw, *kinds)((name, library))(*arguments)
        return bytes(returned), None
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *kinds)((name, library))
    results = []
    for filling in (_EMPTY, _FULL):
        buffer = (ctypes.c_uint8 * _ROOM)(*[filling] * _ROOM)
        call(buffer, *arguments)
        results.append(bytes(buffer))
    written = [index for index, pair in enumerate(zip(*results, strict=True)) if pair != (_EMPTY, _FULL)]
    end = max(written, default=-1) + 1
    return results[0], -(-end // _ALIGNMENT) * _ALIGNMENT


def _load_backends(ggml: Any, folder: str) -> None:
    """Load the ggml backends of builds whose backends are separate files, which load none on their own."""
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    if ggml.ggml_backend_reg_count():
        return
    ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    if not ggml.ggml_backend_reg_count():
        raise RuntimeError(f"{folder} has no ggml backend, such as libggml-cpu")
