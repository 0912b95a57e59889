"""Converts checkpoints in tests."""

from __future__ import annotations

from pathlib import Path

from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.jobs.batching.journal import new_file
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.convert import Conversion, plan_conversion, write_conversion
from tests.support.converting.checkpoints import TinyCheckpoint


def convert(folder: Path, output: Path) -> Conversion:
    """Convert a folder, and return what was planned."""
    with Checkpoint(folder) as checkpoint:
        conversion = plan_conversion(checkpoint)
        with new_file(output) as file:
            write_conversion(conversion, file, output)
    return conversion


def converted(checkpoint: TinyCheckpoint, folder: Path) -> GGUFFile:
    """Write and convert a checkpoint, and open the result."""
    convert(checkpoint.write(folder / "checkpoint"), folder / "converted.gguf")
    return open_gguf(folder / "converted.gguf")
