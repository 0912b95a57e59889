"""Opens the vision encoders of models that read images, and counts their memory.

libmtmd, which is part of llama.cpp, encodes images for all backends, in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from llmrun.backends.sizing import LLAMA_PROCESS, Footprint, vocabulary_bytes

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.llama.vision import LlamaVision
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.layout import Projector
    from llmrun.model.vision.projector import ProjectorFile

# GPU memory of the encoder's process besides the encoder, mostly for its CUDA context, which takes 120 to 550 MB
# depending on the GPU (ggml-org/llama.cpp#20595).
GPU_CONTEXT: Final = 550_000_000


def opened_projector(options: OpenOptions, file: GGUFFile) -> ProjectorFile | None:
    """Return the projector in the options, which fits the model, or None if the options have none.

    Raises ModelFileError and UnsupportedModel.
    """
    if not options.mmproj:
        return None
    from llmrun.model.vision.projector import check_projector, read_projector

    projector = read_projector(Path(options.mmproj), least=options.image_min_tokens, most=options.image_max_tokens)
    check_projector(projector, file)
    return projector


def start_encoder(options: OpenOptions, file: GGUFFile, projector: ProjectorFile) -> LlamaVision:
    """Start the encoder's process, which does not load the projector yet. Raises LlmrunError."""
    from llmrun.backends.llama.vision import LlamaVision
    from llmrun.base.machine.cpu_count import default_threads

    return LlamaVision(file.path, projector, options.threads or default_threads())


def rows_in_one_step(projector: Projector | None) -> int:
    """Return the number of rows that must fit in one step because the rows of an image may attend to each other."""
    return 0 if projector is None or projector.is_causal else projector.most_rows


def with_encoder(
    footprint: Footprint, projector: Projector | None, file: GGUFFile, *, on_gpu: bool = False
) -> Footprint:
    """Add the encoder's process to the footprint of a model.

    The process contains the text model's vocabulary. libmtmd reads the weights, and keeps its buffers.

    on_gpu  whether the weights and the buffers are on a GPU
    """
    if projector is None:
        return footprint
    weights = 0 if on_gpu else projector.weight_bytes
    return replace(
        footprint,
        weights=footprint.weights + weights,
        scratch=footprint.scratch + (0 if on_gpu else projector.memory_bytes - weights),
        vocabulary=footprint.vocabulary + vocabulary_bytes(file),
        programs=footprint.programs + LLAMA_PROCESS,
    )


def encoder_gpu_bytes(projector: Projector) -> int:
    """Return the GPU memory that an encoder on a GPU needs."""
    return projector.memory_bytes + GPU_CONTEXT
