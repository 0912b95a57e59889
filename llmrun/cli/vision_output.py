"""Describes the vision projector of a model for `llmrun show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.hub.local.projectors import projector_for

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile
    from llmrun.options.settings import Settings

PHOTO: Final = (1024, 768)  # the size of the sample photo, in pixels


class VisionFacts(NamedTuple):
    """A model's projector, and how the model sees the sample photo. If the projector cannot be used, both are None.

    path     the projector's file; None if several files match
    problem  why the projector cannot be used, or ""
    """

    path: Path | None
    projector: ProjectorFile | None
    photo: ImageLayout | None
    problem: str


def vision_facts(file: GGUFFile, settings: Settings) -> VisionFacts | None:
    """Return the facts about the projector next to a model's file, or about the file itself if it is a projector.

    Returns None if there is no projector.
    """
    from llmrun.model.vision.projector import check_projector, read_projector

    path = None
    try:
        is_projector = file.string("general.architecture", "") == "clip"
        path = file.path if is_projector else projector_for(file.path)
        if path is None:
            return None
        projector = read_projector(path, least=settings.image_min_tokens, most=settings.image_max_tokens)
        if not is_projector:
            check_projector(projector, file)
        return VisionFacts(path, projector, projector.layout(*PHOTO), "")
    except LlmrunError as error:
        return VisionFacts(path, None, None, str(error))


def vision_fields(facts: VisionFacts) -> Iterator[tuple[str, str]]:
    """Yield the lines of the section "Vision"."""
    if facts.path is not None:
        yield "path", str(facts.path)
    if facts.projector is None or facts.photo is None:
        yield "problem", facts.problem
        return
    quantization, size = quantization_of(facts.projector.path.name), format_bytes(facts.projector.weight_bytes)
    yield "projector", ", ".join(filter(None, (facts.projector.family, quantization, size)))
    side = facts.projector.image_size
    yield "resolution", f"{side} x {side} pixels"
    width, height = PHOTO
    seen = f"seen in {facts.photo.width:,} x {facts.photo.height:,}"
    yield "sample photo", f"{width:,} x {height:,} pixels: {counted(facts.photo.rows, 'token')}, {seen}"


def vision_as_json(facts: VisionFacts | None) -> dict[str, Any] | None:
    """Return the projector as a JSON object, or None."""
    if facts is None:
        return None
    body: dict[str, Any] = {"path": None if facts.path is None else str(facts.path), "problem": facts.problem}
    if facts.projector is not None and facts.photo is not None:
        sample = {"width": PHOTO[0], "height": PHOTO[1], "tokens": facts.photo.rows}
        body |= {"family": facts.projector.family, "bytes": facts.projector.weight_bytes}
        body |= {"image_size": facts.projector.image_size, "sample": sample}
    return body
