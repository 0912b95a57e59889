"""Computes the fingerprint of an open model, which identifies everything that can change the bytes of an answer."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun import __version__
from llmrun.backends.registry import is_stand_in

if TYPE_CHECKING:
    from llmrun.types import ModelInfo

_SAMPLE = 4096  # bytes


def fingerprint(info: ModelInfo, digest: str, *, answering: object) -> str:
    """Return a fingerprint of 16 hexadecimal digits after "fp_".

    digest     identifies the contents of the model file; if empty, `sampled_digest` of `info.path`
    answering  the chat template and thinking tags that replace the model's own, as JSON
    """
    decisive: dict[str, Any] = {
        "version": __version__,
        "digest": digest or _digest_of(info),
        "kv_type": info.kv_type,
        "answering": answering,
        # The portable kernels round differently from those that use fused multiply-add.
        "portable": info.device.endswith("portable"),
    }
    if not info.batch_invariant:
        decisive["machine"] = [info.backend, info.device, info.gpu_layers, platform.machine(), platform.node()]
    return "fp_" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def sampled_digest(path: Path) -> str:
    """Return a digest of a model file's header and of samples of all its tensors.

    Hashing all bytes of a large file would take longer than opening it. Two models with the same header, such as two
    fine-tuned versions of one model, differ in the samples. Raises ModelFileError.
    """
    import numpy as np

    from llmrun.gguf.reader import open_gguf

    hashed = hashlib.sha256()
    with open_gguf(path) as file:
        hashed.update(str(file.file_bytes).encode())
        header_bytes = min((tensor.offset for tensor in file.tensors.values()), default=file.file_bytes)
        with path.open("rb") as stream:
            hashed.update(stream.read(header_bytes))
        for name, tensor in file.tensors.items():
            hashed.update(f"{name} {tensor.nbytes}".encode())
            sample = np.empty(min(_SAMPLE, tensor.nbytes), np.uint8)
            for start in (0, (tensor.nbytes - len(sample)) // 2):
                file.read_into(tensor, start, sample)
                hashed.update(sample.tobytes())
    return hashed.hexdigest()


def _digest_of(info: ModelInfo) -> str:
    path = Path(info.path)
    if not is_stand_in(info.backend):
        return sampled_digest(path)
    return hashlib.sha256(path.read_bytes() if path.is_file() else path.name.encode()).hexdigest()
