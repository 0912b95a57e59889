"""Opens the projectors of models that read images, and checks that text models fit them.

Models without a projector do not import this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import UnsupportedModel, shown

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.vision.layout import Projector
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


def check_plan(plan: Plan, projector: Projector, file: GGUFFile) -> None:
    """Raise UnsupportedModel unless a plan reads the rows of a projector.

    Metadata can claim M-RoPE or deepstack for an architecture that ignores them.
    """
    from llmrun.model.plan.ops.embedding import AddImages, PlaceImages

    placed = sum(op.out.width for op in plan.ops if isinstance(op, PlaceImages))
    parts = 1 + max((op.part for op in plan.ops if isinstance(op, AddImages)), default=0)
    if placed * parts != projector.row_width:
        raise _unreadable(f"has rows of {placed * parts:,} numbers, not {projector.row_width:,}", file)
    check_mrope(any(rope.axes is not None for rope in plan.ropes), projector, file)


def check_mrope(has_mrope: bool, projector: Projector, file: GGUFFile) -> None:
    """Raise UnsupportedModel unless a text model has M-RoPE exactly if a projector uses it."""
    if has_mrope != projector.uses_mrope:
        raise _unreadable("has no M-RoPE" if projector.uses_mrope else "has M-RoPE", file)


def _unreadable(why: str, file: GGUFFile) -> UnsupportedModel:
    path, architecture = shown(str(file.path), 300), shown(file.string("general.architecture"))
    return UnsupportedModel(
        f"images not supported: {path}: the architecture {architecture} {why}, unlike the projector",
        hint="use --no-mmproj for text only",
    )
