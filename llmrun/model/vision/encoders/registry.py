"""Finds the encoder for a projector's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.model.vision.encoders.gemma4v import Gemma4TowerEncoder
from llmrun.model.vision.encoders.internvl import InternVLEncoder
from llmrun.model.vision.encoders.pixtral import PixtralEncoder
from llmrun.model.vision.encoders.qwen import Qwen2VLEncoder, Qwen3VLEncoder, Qwen25VLEncoder
from llmrun.model.vision.encoders.siglip import Gemma3Encoder, Idefics3Encoder, Lfm2Encoder
from llmrun.model.vision.encoders.unified import UnifiedEncoder

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.encoder import VisionEncoder
    from llmrun.model.vision.projector import ProjectorFile

_CLASSES: Final = (
    UnifiedEncoder,
    Gemma3Encoder,
    Idefics3Encoder,
    Lfm2Encoder,
    Gemma4TowerEncoder,
    PixtralEncoder,
    InternVLEncoder,
    Qwen2VLEncoder,
    Qwen25VLEncoder,
    Qwen3VLEncoder,
)
ENCODERS: Final[dict[str, type[VisionEncoder]]] = {name: found for found in _CLASSES for name in found.names}


def encoder_of(file: GGUFFile, projector: ProjectorFile) -> VisionEncoder:
    """Return the encoder of a projector's file. Raises BadGGUF and UnsupportedModel."""
    if projector.family not in ENCODERS:
        path = shown(str(projector.path), 300)
        raise UnsupportedModel(f"projector not supported: {path}: {projector.family}")
    return ENCODERS[projector.family](file, projector)
