"""Opens the folder of a Hugging Face checkpoint: config.json, other JSON files, and tensors in safetensors files.

The files may be damaged or hostile. Every problem raises a one-line error that names the file and the key.

A safetensors file contains the length of its header (u64), the header (JSON), and the data of its tensors without gaps.
The header maps the name of each tensor to its type, its shape and the offsets of its data. The safetensors library
would require PyTorch for BF16, because NumPy has no BF16 type.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError, ModelNotFound, UnsupportedModel, shown
from llmrun.engine.constraint.strict_json import parse_unique
from llmrun.formats.gguf.source import FOLDER, FileSource, kind_of, opened, opening
from llmrun.hub.resolve.model_file import on_hub

# The largest published tokenizer.json is 35 MB in size and contains about 2 million commas and brackets.
_MOST_BYTES = 64 << 20
_MOST_MARKS = 8_000_000  # limited because empty objects take 30 times as much memory as their text
MOST_INTEGER = 2**31 - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ANOTHER = "try another checkpoint, or a GGUF version of the model"

Default = TypeVar("Default")
_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}


class JsonObject:
    """An object in a JSON file.

    path   the path of the file, for error messages
    where  the path of keys that leads to the object, with a dot after each key
    """

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self.values = values
        self._where = where

    def has(self, key: str) -> bool:
        """Return whether the key has a value other than null."""
        return self.values.get(key) is not None

    def object(self, key: str) -> JsonObject:
        """Return the object at a key, or an empty object if the key is missing."""
        return JsonObject(self.path, self._typed(key, dict, {}), f"{self._where}{key}.")

    def objects(self, key: str) -> list[JsonObject]:
        """Return the array of objects at a key, or an empty list if the key is missing."""
        found = self.array(key)
        for index, value in enumerate(found):
            if not isinstance(value, dict):
                raise self.bad(key, f"element {index} must be an object, not {_kind(value)}")
        return [JsonObject(self.path, value, f"{self._where}{key}.{index}.") for index, value in enumerate(found)]

    def array(self, key: str) -> list[Any]:
        """Return the array at a key, or an empty array if the key is missing."""
        found: list[Any] = self._typed(key, list, [])
        return found

    def string(self, key: str, default: str = "") -> str:
        found: str = self._typed(key, str, default)
        return found

    @overload
    def boolean(self, key: str, default: bool) -> bool: ...
    @overload
    def boolean(self, key: str, default: None) -> bool | None: ...
    def boolean(self, key: str, default: bool | None) -> bool | None:
        found: bool | None = self._typed(key, bool, default)
        return found

    @overload
    def integer(self, key: str, *, minimum: int = 1) -> int: ...
    @overload
    def integer(self, key: str, default: Default, *, minimum: int = 1) -> int | Default: ...
    def integer(self, key: str, default: Any = ..., *, minimum: int = 1) -> Any:
        """Return an integer from `minimum` to MOST_INTEGER. Without a default, the key is required."""
        if self._missing(key, default):
            return default
        value = self.values[key]
        if type(value) is not int or not minimum <= value <= MOST_INTEGER:
            raise self.bad(key, f"must be an integer of {minimum} to {MOST_INTEGER:,}, not {_kind(value)}")
        return value

    @overload
    def positive(self, key: str) -> float: ...
    @overload
    def positive(self, key: str, default: Default) -> float | Default: ...
    def positive(self, key: str, default: Any = ...) -> Any:
        """Return a number above 0 that fits into a float32. Without a default, the key is required."""
        if self._missing(key, default):
            return default
        value = self.values[key]
        if type(value) not in (int, float) or not isfinite(value) or not 1e-30 < value < 1e30:
            raise self.bad(key, f"must be a positive number, not {_kind(value)}")
        return float(value)

    def bad(self, key: str, seen: str) -> ModelFileError:
        """Return the error for an invalid value."""
        return bad_checkpoint(self.path, f"{shown(self._where + key)} {seen}")

    def unsupported(self, key: str, seen: str) -> UnsupportedModel:
        """Return the error for a value that cannot be converted."""
        return unsupported(self.path, f"{shown(self._where + key)} {seen}")

    def _missing(self, key: str, default: Any) -> bool:
        if self.has(key):
            return False
        if default is ...:
            raise self.bad(key, "is missing")
        return True

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        if not self.has(key):
            return default
        value = self.values[key]
        if type(value) is not kind:
            raise self.bad(key, f"must be {_TYPES[kind]}, not {_kind(value)}")
        return value


def bad_checkpoint(path: Path, seen: str) -> ModelFileError:
    """Return the error for a file that breaks a rule of its format."""
    return ModelFileError(f"not a valid checkpoint: {shown(str(path), 300)}: {seen}", hint="download the file again")


def unsupported(path: Path, seen: str, hint: str = _ANOTHER) -> UnsupportedModel:
    """Return the error for a checkpoint that cannot be converted."""
    return UnsupportedModel(f"cannot be converted: {shown(str(path), 300)}: {seen}", hint=hint)


def read_json(path: Path) -> JsonObject:
    """Read a JSON file that contains a single object. Raises ModelNotFound and ModelFileError."""
    return parse_object(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a text file. Raises ModelNotFound and ModelFileError."""
    with opening(path), opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise bad_checkpoint(path, f"has {size:,} bytes, but files of its kind have at most {_MOST_BYTES:,}")
        data = file.readall()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_checkpoint(path, f"is not UTF-8 text: byte {error.start:,} is invalid") from None


def parse_object(text: str, path: Path) -> JsonObject:
    """Parse one object. `path` appears in error messages. Raises ModelFileError."""
    if sum(map(text.count, ",[{")) > _MOST_MARKS:
        raise bad_checkpoint(path, f"the JSON has more than {_MOST_MARKS:,} commas and brackets")
    try:
        value = parse_unique(text)
    except RecursionError:
        raise bad_checkpoint(path, "the JSON is nested too deeply") from None
    except ValueError as error:
        raise bad_checkpoint(path, f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_checkpoint(path, f"must contain an object, not {_kind(value)}")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad_checkpoint(path, "has text with an unpaired surrogate") from None
    return JsonObject(path, value)


def _kind(value: Any) -> str:
    """Describe a value briefly."""
    return _TYPES.get(type(value), "") if isinstance(value, dict | list) else f"'{shown(str(value), 40)}'"


_MOST_HEADER_BYTES = 16 << 20  # The header of a model with 70 billion weights is 0.3 MB in size.
_MOST_SIZE = 1 << 48  # The limit of a dimension and of a tensor's bytes, so that products remain small integers.
_MOST_DIMENSIONS = 64  # the maximum number of dimensions in NumPy
_METADATA = "__metadata__"

# NumPy types with the same item size. BF16 is read as raw bits.
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "<u1",
    "F8_E4M3": "<u1",
    "F8_E5M2": "<u1",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `shape` is in NumPy's order, and `begin` is in bytes from the start of the file."""

    file: SafetensorsFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def read(self) -> NDArray[Any]:
        """Read the whole tensor. BF16 is returned as uint16. Raises ModelFileError."""
        return self.read_rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)

    def read_rows(self, first: int, end: int) -> NDArray[Any]:
        """Read the rows `first` to `end` of the first dimension. Raises ModelFileError."""
        row_shape = self.shape[1:]
        data = np.empty((end - first, *row_shape), DTYPES[self.dtype])
        row_bytes = data.itemsize * prod(row_shape)
        self.file.source.read(self.begin + first * row_bytes, data.reshape(-1).view(np.uint8).data)
        return data

    def bad(self, seen: str) -> ModelFileError:
        return bad_checkpoint(self.file.path, f"{shown(self.name)} {seen}")


class SafetensorsFile:
    """An open file with a checked header. `tensors` maps names to tensors, in the order of their data."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ModelNotFound and ModelFileError."""
        self.path = path
        self.source = FileSource(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.source.close()
            raise

    def close(self) -> None:
        self.source.close()

    def _read_header(self) -> dict[str, StoredTensor]:
        if self.source.size < 8:
            raise bad_checkpoint(self.path, f"has {self.source.size} bytes, too few for a safetensors file")
        length = int.from_bytes(self._bytes(0, 8), "little")
        start = 8 + length
        if start > self.source.size or length > _MOST_HEADER_BYTES:
            limit = min(self.source.size - 8, _MOST_HEADER_BYTES)
            raise bad_checkpoint(self.path, f"the header must have at most {limit:,} bytes, not {length:,}")
        try:
            text = self._bytes(8, length).decode()
        except UnicodeDecodeError:
            raise bad_checkpoint(self.path, "is not a safetensors file, or its header is damaged") from None
        header = parse_object(text, self.path)
        found = [self._tensor(name, header.object(name).values, start) for name in header.values if name != _METADATA]
        found.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
        end = start
        for tensor in found:
            if tensor.begin != end:
                raise tensor.bad(f"begins at byte {tensor.begin:,}, but the data before it ends at byte {end:,}")
            end += tensor.nbytes
        if end != self.source.size:
            seen = f"has {self.source.size:,} bytes, but its tensors end at byte {end:,}"
            raise bad_checkpoint(self.path, f"{seen}; it may be incomplete" if end > self.source.size else seen)
        return {tensor.name: tensor for tensor in found}

    def _tensor(self, name: str, entry: Any, start: int) -> StoredTensor:
        """Check one entry of the header. The entry's offsets are relative to the end of the header, at byte `start`."""
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise bad_checkpoint(self.path, f"{shown(name)} has the unknown type '{shown(str(dtype), 40)}'")
        if not _are_sizes(shape) or prod(shape) > _MOST_SIZE:
            raise bad_checkpoint(self.path, f"{shown(name)} has an invalid shape")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise bad_checkpoint(self.path, f"{shown(name)} has invalid data_offsets")
        nbytes = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if offsets[1] - offsets[0] != nbytes:
            seen = f"{shown(name)} needs {nbytes:,} bytes, but has {offsets[1] - offsets[0]:,}"
            raise bad_checkpoint(self.path, seen)
        return StoredTensor(self, name, dtype, tuple(shape), start + offsets[0], nbytes)

    def _bytes(self, offset: int, n: int) -> bytes:
        data = bytearray(n)
        self.source.read(offset, memoryview(data))
        return bytes(data)


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= _MOST_SIZE for size in value)


CONFIG = "config.json"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ENDING = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MOST_FILES = 1000
_NAME_THE_FOLDER = f"name the folder that contains {CONFIG} and the safetensors files"


class Checkpoint:
    """An open checkpoint. The class is a context manager.

    folder   the path of the checkpoint
    config   the contents of config.json
    tensors  name -> tensor, from all safetensors files
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises ModelNotFound and ModelFileError, the latter also for pickle files."""
        try:
            kind = kind_of(folder)
        except (OSError, ValueError):
            raise ModelNotFound(f"no such folder: {shown(str(folder), 300)}", hint=_hint_for_missing(folder)) from None
        if kind != FOLDER:
            raise ModelFileError(
                f"not a folder: {shown(str(folder), 300)}",
                hint=_NAME_THE_FOLDER,
            )
        if not (folder / CONFIG).exists():
            raise ModelNotFound(
                f"not a checkpoint: {shown(str(folder), 300)}: the folder contains no {CONFIG}",
                hint=_NAME_THE_FOLDER,
            )
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self._sources: list[FileSource] = []
        with ExitStack() as files:
            self.tensors = self._open(files)
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def check_unchanged(self) -> None:
        """Raise ModelFileError if any of the safetensors files was modified after opening."""
        for file in self._sources:
            file.check_unchanged()

    def json(self, name: str) -> JsonObject | None:
        """Read one of the folder's JSON files, or return None if the file does not exist."""
        path = self.folder / name
        return read_json(path) if self.has(name) else None

    def text(self, name: str) -> str | None:
        """Read one of the folder's text files, or return None if the file does not exist."""
        return read_text(self.folder / name) if self.has(name) else None

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _open(self, files: ExitStack) -> dict[str, StoredTensor]:
        # Like transformers, prefer the single file: an index beside the file may belong to the original model.
        index = None if self.has(_ONE_FILE) else self.json(_INDEX)
        if index is None:
            return dict(self._open_file(self._only_file(), files))
        placed = {name: index.object("weight_map").string(name) for name in index.object("weight_map").values}
        names = sorted(set(placed.values()))
        if not names or len(names) > _MOST_FILES:
            raise index.bad("weight_map", f"must name 1 to {_MOST_FILES} files, not {len(names)}")
        tensors: dict[str, StoredTensor] = {}
        for name in names:
            if name != Path(name).name or not name.endswith(_ENDING):
                raise index.bad("weight_map", f"must name {_ENDING} files in this folder, not '{shown(name)}'")
            for tensor, stored in self._open_file(self.folder / name, files).items():
                if placed.get(tensor) != name:
                    raise stored.bad(f"is in this file, but {_INDEX} does not place it here")
                tensors[tensor] = stored
        missing = placed.keys() - tensors.keys()
        if missing:
            first = min(missing)
            raise bad_checkpoint(self.folder / placed[first], f"{shown(first)} is missing, but {_INDEX} names it")
        return tensors

    def _open_file(self, path: Path, files: ExitStack) -> dict[str, StoredTensor]:
        file = SafetensorsFile(path)
        files.callback(file.close)
        self._sources.append(file.source)
        return file.tensors

    def _only_file(self) -> Path:
        """Return the only safetensors file, which may have any name. Raises ModelNotFound and ModelFileError."""
        with opening(self.folder):
            names = sorted(path.name for path in self.folder.iterdir())
        found = [name for name in names if name.endswith(_ENDING)]
        if _ONE_FILE in found or len(found) == 1:
            return self.folder / (_ONE_FILE if _ONE_FILE in found else found[0])
        if found:
            raise ModelFileError(
                f"not a complete checkpoint: {shown(str(self.folder), 300)}: {len(found)} safetensors files, "
                f"but no {_INDEX}",
                hint="download the index, too, or leave only the files of one model in the folder",
            )
        pickled = next((name for name in names if name.endswith(_PICKLES)), None)
        if pickled is not None:
            raise unsupported(
                self.folder / pickled,
                "pickle files can run any code when they are read, so llmrun never reads them",
                "use a checkpoint with safetensors files",
            )
        raise ModelNotFound(
            f"no weights: {shown(str(self.folder), 300)}: no safetensors files in this folder",
            hint="download the whole checkpoint",
        )


def _hint_for_missing(folder: Path) -> str:
    if on_hub(folder) is None:
        return "check the path"
    return f"download the model first: hf download {folder.as_posix()} --local-dir {folder.name}"
