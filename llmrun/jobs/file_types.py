"""The target file types of quantization, under the names that llama-quantize uses."""

from __future__ import annotations

from typing import Final, NamedTuple

from llmrun.base.errors import UsageError
from llmrun.formats.gguf.quantization import FILE_TYPES

COPY: Final = "COPY"  # copies the tensors unchanged, for example to join shards
_ALIASES: Final = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_NOT_WRITTEN: Final = "NVFP4"  # llama.cpp reads files of this type, but does not offer to write them
_IDS: Final = {name: number for number, name in FILE_TYPES.items() if name != _NOT_WRITTEN}
FILE_TYPE_NAMES: Final = (*_IDS, *_ALIASES, COPY)

_NO_WEIGHTS: Final = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")


class FileType(NamedTuple):
    """A file type. `number` is the type's value in llama.cpp's `enum llama_ftype`."""

    name: str
    number: int


def file_type_named(text: str) -> FileType:
    """Return the file type with this name, in upper or lower case. Raises UsageError for unknown names."""
    name = _known(text, FILE_TYPE_NAMES, "TYPE", "a file type that llama.cpp writes")
    if name == COPY:
        return FileType(COPY, _IDS["F32"])
    name = _ALIASES.get(name, name)
    return FileType(name, _IDS[name])


def weight_type_named(text: str, flag: str) -> str:
    """Return the name of the weight type for a flag, in upper case. Raises UsageError for unknown names."""
    return _known(text, weight_type_names(), flag, "a weight type")


def weight_type_names() -> tuple[str, ...]:
    """Return the names of all weight types."""
    from llmrun.formats.quants.registry import BY_NAME  # imported late, because this module imports NumPy

    return tuple(name for name in BY_NAME if name not in _NO_WEIGHTS)


def _known(text: str, names: tuple[str, ...], argument: str, kind: str) -> str:
    wanted = text.upper()
    if wanted in names:
        return wanted
    import difflib

    near = difflib.get_close_matches(wanted, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names)}"
    raise UsageError(f"{argument}: {text!r} is not {kind}", hint=hint)
