"""Opens models with their vision projectors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.base import OpenOptions
    from llmrun.hub.resolve.model_file import ResolvedModel
    from llmrun.model.vision.projector import ProjectorFile
    from llmrun.options.settings import Settings


def with_projector(
    options: OpenOptions, model: ResolvedModel, settings: Settings, *, wanted: bool = False, needed: bool = False
) -> OpenOptions:
    """Return the options for opening a model with its projector, if it has one.

    wanted, needed  as in `projector_options`

    Raises UsageError if this machine cannot use the projector, except that `wanted` alone gives a note. May raise any
    LlmrunError from the hub.
    """
    from llmrun.backends.registry import check_options
    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.resolve.projectors import projector_options

    mmproj, least, most = projector_options(
        model.path, settings, name=model.name, wanted=wanted, needed=needed, reporter=HubReporter()
    )
    if not mmproj:
        return options
    out.detail(f"projector  {mmproj}")
    options = replace(options, mmproj=mmproj, image_min_tokens=least, image_max_tokens=most)
    check_options(options)
    return options


def projector_of(model: Path, settings: Settings) -> ProjectorFile | None:
    """Read the header of a model's projector. Returns None if there is no projector, or if the header is not valid."""
    from llmrun.hub.local.projectors import projector_for
    from llmrun.model.vision.projector import read_projector

    try:
        path = projector_for(model, settings.mmproj)
        least, most = settings.image_min_tokens, settings.image_max_tokens
        return None if path is None else read_projector(path, least=least, most=most)
    except LlmrunError:  # opening the model with the projector will report the error
        return None
