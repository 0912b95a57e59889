"""A digest that identifies a model without reading all of its bytes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

_SAMPLE = 4096  # bytes


def sampled_digest(file: GGUFFile) -> str:
    """Return a sha256, in hexadecimal, of a model's header and of samples of all its tensors.

    Hashing all bytes of a large file would take longer than opening it. Two models with the same header, such as two
    fine-tuned versions of one model, differ in the samples. Raises ModelFileError.
    """
    hashed = hashlib.sha256()
    hashed.update(str(file.file_bytes).encode())
    header_bytes = min((tensor.offset for tensor in file.tensors.values()), default=file.file_bytes)
    with file.path.open("rb") as stream:
        hashed.update(stream.read(header_bytes))
    for name, tensor in file.tensors.items():
        hashed.update(f"{name} {tensor.nbytes}".encode())
        sample = np.empty(min(_SAMPLE, tensor.nbytes), np.uint8)
        for start in (0, (tensor.nbytes - len(sample)) // 2):
            file.read_into(tensor, start, sample)
            hashed.update(sample.tobytes())
    return hashed.hexdigest()
