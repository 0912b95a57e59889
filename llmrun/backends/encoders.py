"""Opens the projectors of models that read images, and starts their encoders.

libmtmd, which is part of llama.cpp, encodes images for all backends, in a process of its own. sizing.py counts the
memory of this process. Models without a projector do not import this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.llama.vision import LlamaVision
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile


def opened_projector(options: OpenOptions, file: GGUFFile) -> ProjectorFile | None:
    """Return the projector that the options name, or None if they name none.

    Raises ModelFileError, and UnsupportedModel if the projector does not fit the model.
    """
    if not options.mmproj:
        return None
    from llmrun.model.vision.projector import check_projector, read_projector

    projector = read_projector(Path(options.mmproj), least=options.image_min_tokens, most=options.image_max_tokens)
    check_projector(projector, file)
    return projector


def start_encoder(options: OpenOptions, file: GGUFFile) -> LlamaVision:
    """Start the encoder's process, which does not load the projector yet. The options must have a projector.

    Raises the errors of `opened_projector`, and LlmrunError.
    """
    from llmrun.backends.llama.vision import LlamaVision
    from llmrun.base.machine.cpu_count import default_threads

    projector = opened_projector(options, file)
    assert projector is not None
    return LlamaVision(file.path, projector, options.threads or default_threads())
