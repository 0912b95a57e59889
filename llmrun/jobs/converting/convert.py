"""Converts the folder of a checkpoint to a GGUF file.

The file is planned first, which reads every header, scale and zero point, so a checkpoint that cannot be converted is
refused before anything is written. The weights are then read, repacked and written matrix by matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from llmrun.formats.gguf.reader import no_other, read_source
from llmrun.formats.gguf.source import FileSource
from llmrun.formats.gguf.writer import NewTensor, NewValue, file_bytes, write_gguf
from llmrun.formats.quants.registry import BY_NAME
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.forms import form_of, hyperparameters, modules_of, read_shape, rope_factors
from llmrun.jobs.converting.quantization import read_quantization
from llmrun.jobs.converting.special_tokens import chat_templates, special_tokens
from llmrun.jobs.converting.tensors import tensors_of
from llmrun.jobs.converting.tokenizer import read_vocabulary, vocabulary_metadata

# The values of `general.file_type` for the weight types that occur, as in llama.cpp's `enum llama_ftype`.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 8, "BF16": 32}
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class Conversion:
    """A planned GGUF file. `notes` tell the user what the file cannot express."""

    checkpoint: Checkpoint
    metadata: dict[str, NewValue]
    tensors: list[NewTensor]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        return file_bytes(self.metadata, self.tensors)

    @property
    def type_counts(self) -> dict[str, int]:
        """The number of tensors of each weight type, most frequent first."""
        return dict(Counter(tensor.type.name for tensor in self.tensors).most_common())


def plan_conversion(checkpoint: Checkpoint) -> Conversion:
    """Plan the GGUF file of a checkpoint. Raises ModelFileError and UnsupportedModel."""
    config = checkpoint.config
    form = form_of(config)
    shape = read_shape(config, form)
    quantization = read_quantization(checkpoint)
    vocabulary = read_vocabulary(checkpoint, shape.vocabulary)
    special, notes = special_tokens(checkpoint, vocabulary)
    tensors = tensors_of(checkpoint, modules_of(form, shape), quantization, tied=shape.tied)
    factors = rope_factors(config, shape)
    if factors is not None:
        tensors.insert(0, NewTensor("rope_freqs.weight", BY_NAME["F32"], (len(factors),), lambda: [factors]))
    if shape.window is not None and shape.window < shape.context:
        notes.append(
            f"the context is limited to {shape.window:,} of {shape.context:,} tokens, because the model has a sliding "
            f"window, which GGUF files of {form.architecture} cannot express"
        )
    most = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]
    metadata: dict[str, NewValue] = {
        "general.architecture": form.architecture,
        "general.name": checkpoint.folder.resolve().name.encode(errors="replace").decode(),
        "general.file_type": _FILE_TYPES[most],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **hyperparameters(checkpoint, form, shape),
        **vocabulary_metadata(vocabulary),
        **special,
        **chat_templates(checkpoint),
    }
    return Conversion(checkpoint, metadata, tensors, notes)


def write_conversion(
    conversion: Conversion, file: FileIO, path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the planned file, and check it with the strict reader.

    file      an empty file, open for writing
    path      its future name, for error messages
    progress  is called with the number of bytes that are done, and their total
    Raises OSError, and ModelFileError if the checkpoint has changed or the result breaks a rule of the GGUF format.
    """
    total = sum(tensor.nbytes for tensor in conversion.tensors)
    done = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(done, total)

    progress(done, total)
    write_gguf(file, conversion.metadata, conversion.tensors, count)
    conversion.checkpoint.check_unchanged()
    read_source(FileSource(Path(file.name)), path, no_other).close()
