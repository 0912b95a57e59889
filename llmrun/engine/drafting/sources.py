"""Opens the draft sources of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.engine.drafting.base import DraftSource
from llmrun.engine.drafting.lookup import LookupSource

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions


def uses_draft_head(speculate: bool | None, draft: Path | str | None) -> bool:
    """Return whether to load the model's draft head.

    speculate  see `Engine.open`
    draft      the draft model, or None without one
    """
    return speculate is not False and draft is None


def open_sources(
    speculate: bool | None, draft: Path | None, options: OpenOptions, target: Backend
) -> list[DraftSource]:
    """Return the draft sources for `target`, which was opened with `options`. `Engine.open` describes the parameters.

    Sources whose drafts take no time are listed first. Raises the errors of `Engine.open`.
    """
    sources: list[DraftSource] = []
    if draft is not None:
        from llmrun.engine.drafting.model import open_draft_model

        sources.append(open_draft_model(draft, options, target))
    if draft is not None or (target.info.batch_invariant if speculate is None else speculate):
        sources.insert(0, LookupSource())
    if sources and target.draft_head is not None:
        from llmrun.engine.drafting.head import HeadSource

        sources.append(HeadSource(target.draft_head))
    return sources
