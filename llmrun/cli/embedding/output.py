"""Writes vectors and rankings."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_json
from llmrun.jobs.batching.files import MORE_ROOM, new_file, remove_leftovers, resolved

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.cli.embedding.inputs import Input

_ARRAY, _LINES = ".npy", ".jsonl"


def check_output(path: Path, source: Path | None) -> None:
    """Check the name of a file for vectors before they are computed. An existing file will be replaced.

    source  the file with the texts, or None

    Raises UsageError if the name does not tell the format, if a folder or a pipe has it, if its folder is missing or
    cannot be written, or if it is that of the source.
    """
    if path.suffix not in (_ARRAY, _LINES):
        raise UsageError(f"--output: {path}: the name must end in {_ARRAY} or {_LINES}")
    folder = resolved(path).parent
    if not folder.is_dir():
        raise UsageError(f"--output: {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--output: {path}: the folder {folder} cannot be written")
    if path.exists() and not path.is_file():
        raise UsageError(f"--output: {path}: not a file")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"--output: {path}: the output must not be the input")


def write_vectors(vectors: Sequence[NDArray[np.float32]], inputs: Sequence[Input], path: Path | None) -> None:
    """Write vectors as float32[texts, dimensions] to a .npy file, or as JSON lines to a file or stdout.

    A file gets its name when it is complete. Raises DoesNotFit and LlmrunError.
    """
    if path is None:
        out.lines(_lines_of(vectors, inputs))
        return
    lines = (f"{line}\n".encode() for line in _lines_of(vectors, inputs))
    target = resolved(path)
    remove_leftovers(target)
    with new_file(target, hint=MORE_ROOM) as file, open(file.fileno(), "wb", closefd=False) as stream:
        stream.writelines(_array_of(vectors) if path.suffix == _ARRAY else lines)


def _array_of(vectors: Sequence[NDArray[np.float32]]) -> Iterator[bytes]:
    """Yield the parts of a .npy file. `numpy.save` loses the reason if a write fails."""
    from numpy.lib import format as npy

    header = io.BytesIO()
    shape = (len(vectors), len(vectors[0]))
    npy.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    yield header.getvalue()
    for vector in vectors:
        yield vector.astype("<f4").tobytes()


def _lines_of(vectors: Sequence[NDArray[np.float32]], inputs: Sequence[Input]) -> Iterator[str]:
    for index, (vector, each) in enumerate(zip(vectors, inputs, strict=True)):
        name = {"id": each.name} if each.name else {}
        start = visible_json(json.dumps({"index": index, **name}, ensure_ascii=False))
        # The shortest digits that give the same float32.
        features = ", ".join(str(feature) for feature in vector)
        yield f'{start[:-1]}, "embedding": [{features}]}}'


def write_ranking(scores: Sequence[float], documents: Sequence[Input], top: int | None, *, as_json: bool) -> None:
    """Print the documents with their scores, the best first. Documents with equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top]
    if as_json:
        results = [
            {"index": index, "document": documents[index].name, "relevance_score": scores[index]} for index in order
        ]
        out.json({"results": results})
        return
    out.lines(f"{scores[index]:10.4f}  {documents[index].name}" for index in order)
