"""Models split into several files (shards), as written by llama.cpp's gguf-split and by gguf-py.

The shards are named `NAME-00001-of-00003.gguf` and so on. The first shard contains the metadata. Each shard
contains some of the tensors and these keys:

    split.no             u16, the shard's index, which starts at 0 (in file names, it starts at 1)
    split.count          u16, the number of shards
    split.tensors.count  i32, the number of tensors in all shards

This module enforces the rules of llama.cpp's loader and some of its own. A split model is opened from its first shard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.base.errors import ModelFileError
from llmrun.formats.gguf.metadata import Metadata
from llmrun.formats.gguf.problems import shown

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"

_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Split:
    """The shard metadata of a split model, read from its first shard.

    prefix   the common prefix of the shards' file names
    count    the number of shards
    tensors  the number of tensors in all shards
    """

    prefix: str
    count: int
    tensors: int

    @property
    def other_names(self) -> list[str]:
        """The file names of all shards but the first, in order."""
        return [_name(self.prefix, number, self.count) for number in range(1, self.count)]


def read_split(first: Metadata) -> Split | None:
    """Read the shard metadata. Returns None if the model is not split, regardless of the file name.

    Raises BadGGUF, or a ModelFileError that names the first shard if this is not the first shard.
    """
    if not first.has(COUNT):
        return None
    count = _number(first, COUNT, "u16")
    if count <= 1:  # the count is 0 in a file that was merged from several shards
        return None
    number = _number(first, NUMBER, "u16", maximum=count - 1)
    tensors = _number(first, TENSORS, "i32")
    prefix = _checked_prefix(first, number, count)
    if number:
        raise ModelFileError(
            f"not the first file of its model: {shown(str(first.path), 300)}: file {number + 1} of {count}",
            hint=f"Use the first file: {shown(str(first.path.with_name(_name(prefix, 0, count))), 300)}",
        )
    return Split(prefix, count, tensors)


def check_shard(shard: Metadata, number: int, split: Split, first: Metadata) -> None:
    """Check that `shard` has index `number` in the model whose first shard is `first`. Raises BadGGUF."""
    for key, type_, expected in ((NUMBER, "u16", number), (COUNT, "u16", split.count), (TENSORS, "i32", split.tensors)):
        seen = _number(shard, key, type_)
        if seen != expected:
            raise shard.bad(key, f"must be {expected} in file {number + 1} of {split.count}, not {seen}")
    key = "general.architecture"
    if shard.has(key) and shard.string(key) != first.string(key, None):
        wanted = shown(first.string(key, "none"))
        raise shard.bad(key, f"must be '{wanted}' as in the first file, not '{shown(shard.string(key))}'")


def _checked_prefix(file: Metadata, number: int, count: int) -> str:
    """Return the common prefix of the shards' file names.

    The other shards are found by name, so the name of this file must match its keys. Raises BadGGUF if it does not.
    """
    named = _NAME.fullmatch(file.path.name)
    if named is None:
        wanted = _name("NAME", number, count)
        raise file.bad(COUNT, f"is {count}, and the files are found by name, so this one must be called {wanted}")
    prefix, n, of = named[1], int(named[2]), int(named[3])
    if of != count:
        raise file.bad(COUNT, f"must be {of} to match the file name, not {count}")
    if n != number + 1:
        raise file.bad(NUMBER, f"must be {n - 1} to match the file name ({n} of {of}), not {number}")
    return prefix


def _name(prefix: str, number: int, count: int) -> str:
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


def _number(file: Metadata, key: str, type_: str, maximum: int | None = None) -> int:
    value = file.integer(key, minimum=0, maximum=maximum)
    if file.types[key] != type_:
        raise file.bad(key, f"must be {type_}, not {file.types[key]}")
    return value
