"""Describes the vision projector of a model for `llmrun show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.base.amounts import counted, format_bytes, format_seconds_roughly
from llmrun.base.errors import LlmrunError, UnsupportedModel
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.local.projectors import projector_for
from llmrun.model.vision.layout import PHOTO

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.hub.names import Artifact
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile
    from llmrun.options.settings import Settings


class VisionFacts(NamedTuple):
    """A model's projector, and how the model sees the sample photo. If the projector cannot be used, both are None.

    path     the projector's file; None if several files match
    problem  why the projector cannot be used, or ""
    photo_s  the seconds that encoding the photo takes on the CPU engine; None if this machine was never measured
    """

    path: Path | None
    projector: ProjectorFile | None
    photo: ImageLayout | None
    problem: str
    photo_s: float | None = None


def vision_facts(file: GGUFFile, settings: Settings) -> VisionFacts | None:
    """Return the facts about the projector next to a model's file, or about the file itself if it is a projector.

    Returns None if there is no projector.
    """
    path = None
    try:
        is_projector = file.string("general.architecture", "") == "clip"
        path = file.path if is_projector else projector_for(file.path)
        if path is None:
            return None
        with open_gguf(path) as opened:
            return _facts(opened, None if is_projector else file, settings)
    except LlmrunError as error:
        return VisionFacts(path, None, None, str(error))


def remote_vision_facts(model: Artifact, file: GGUFFile, settings: Settings) -> VisionFacts | None:
    """Return the facts about the projector of a model on the Hub, of which only headers are fetched.

    file  the model's header
    Returns None if there is no projector.
    """
    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.remote.model_headers import read_header
    from llmrun.hub.resolve.projectors import may_see_images, projector_on_hub

    if not may_see_images(file):
        return None
    try:
        found = projector_on_hub(model, HubReporter())
        if found is None:
            return None
        with read_header(found) as opened:
            return _facts(opened, file, settings)
    except LlmrunError as error:
        return VisionFacts(None, None, None, str(error))


def _facts(file: GGUFFile, model: GGUFFile | None, settings: Settings) -> VisionFacts:
    """Return the facts about the projector in a file. May raise any LlmrunError of the reader.

    model  the model that the projector must fit, or None for any
    """
    from llmrun.model.vision.projector import check_projector, projector_in

    projector = projector_in(file, least=settings.image_min_tokens, most=settings.image_max_tokens)
    if model is not None:
        check_projector(projector, model)
    return VisionFacts(file.path, projector, projector.layout(*PHOTO), "", _known_seconds(file, projector, settings))


def _known_seconds(file: GGUFFile, projector: ProjectorFile, settings: Settings) -> float | None:
    """Return the time for the sample photo, or None if `llmrun fit` has not measured the ops of such an encoder."""
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.registry import BACKENDS
    from llmrun.base.machine.cpu_count import default_threads

    threads = settings.threads or default_threads()
    speeds = Speeds.of_this_machine(threads)
    try:
        with speeds.only_known():
            return BACKENDS[0].kind().image_costs(file, projector, threads, speeds).photo_s
    except (LookupError, UnsupportedModel):
        return None


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
    if facts.photo_s is not None:
        seen += f", encoded in {format_seconds_roughly(facts.photo_s)}"
    yield "sample photo", f"{width:,} x {height:,} pixels: {counted(facts.photo.rows, 'token')}, {seen}"


def vision_as_json(facts: VisionFacts | None) -> dict[str, Any] | None:
    """Return the projector as a JSON object, or None."""
    if facts is None:
        return None
    body: dict[str, Any] = {"path": None if facts.path is None else str(facts.path), "problem": facts.problem}
    if facts.projector is not None and facts.photo is not None:
        sample: dict[str, Any] = {"width": PHOTO[0], "height": PHOTO[1], "tokens": facts.photo.rows}
        sample |= {"encode_s": facts.photo_s}
        body |= {"family": facts.projector.family, "bytes": facts.projector.weight_bytes}
        body |= {"image_size": facts.projector.image_size, "sample": sample}
    return body
