"""Lets servers and batches open a model with its vision projector."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.backends.registry import check_options
from llmrun.cli.console.progress import HubReporter
from llmrun.hub.resolve.projectors import projector_options

if TYPE_CHECKING:
    from llmrun.cli.answers.answering import ModelFiles
    from llmrun.options.settings import Settings


def reading_images(files: ModelFiles, settings: Settings, *, needed: bool = False) -> ModelFiles:
    """Return the files with options that open the projector, too. A note says if this machine cannot use the projector.

    needed  True if there is an image, so that a model without a projector is an error

    Raises UsageError and ModelNotFound for a projector that the settings name and that cannot be used.
    """
    found = files.found
    mmproj, least, most = projector_options(
        found.path, settings, name=found.name, wanted=True, needed=needed, reporter=HubReporter()
    )
    if not mmproj:
        return files
    options = replace(files.options, mmproj=mmproj, image_min_tokens=least, image_max_tokens=most)
    check_options(options)
    return replace(files, options=options)
