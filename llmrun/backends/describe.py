"""Builds the description of an open model (ModelInfo) from its GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.base.types import Adapter, LoadTimes, ModelInfo
from llmrun.formats.gguf.vocabulary import SUPPRESSED
from llmrun.formats.layouts.kv import parse_kv_type
from llmrun.model.archs.parts.tensors import parameter_count, quantization

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile


def describe(
    file: GGUFFile,
    *,
    vocabulary_size: int,
    train_context: int,
    context_size: int,
    max_sequences: int,
    backend: str,
    device: str,
    threads: int,
    kv_type: str,
    kv_bytes: int,
    hidden_size: int,
    has_logits: bool = True,
    gpu_layers: str = "",
    batch_invariant: bool = False,
    adapters: tuple[Adapter, ...] = (),
    load_times: LoadTimes | None = None,
) -> ModelInfo:
    """Return the ModelInfo of an open file. Array metadata is left out because it is freed when the file is closed."""
    return ModelInfo(
        path=str(file.path),
        name=file.string("general.name", file.path.stem),
        architecture=file.string("general.architecture"),
        file_type=quantization(file),
        parameters=parameter_count(file),
        file_bytes=file.file_bytes,
        vocabulary_size=vocabulary_size,
        train_context=train_context,
        context_size=context_size,
        max_sequences=max_sequences,
        backend=backend,
        device=device,
        threads=threads,
        gpu_layers=gpu_layers,
        hidden_size=hidden_size,
        has_logits=has_logits,
        kv_type=str(parse_kv_type(kv_type)),
        kv_bytes=kv_bytes,
        weight_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
        batch_invariant=batch_invariant,
        adapters=adapters,
        suppressed_tokens=_suppressed(file, vocabulary_size),
        metadata={key: value for key, value in file.metadata.items() if isinstance(value, bool | int | float | str)},
        load_times=load_times,
    )


def _suppressed(file: GGUFFile, vocabulary_size: int) -> tuple[int, ...]:
    """Return the suppressed tokens, except ids outside the vocabulary, which llama.cpp ignores too."""
    if SUPPRESSED not in file.metadata:
        return ()
    return tuple(token for token in file.integers(SUPPRESSED).tolist() if 0 <= token < vocabulary_size)
