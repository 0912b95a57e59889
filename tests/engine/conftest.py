"""A fixture for tests that create many engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmrun.engine.constraint.process import ConstraintProcess
from llmrun.engine.templates.chat_template import TemplateProcess


@pytest.fixture(scope="module")
def shared_processes() -> Iterator[None]:
    """Let all engines of a module share their isolated processes. Starting them takes up to 0.5 s per engine."""
    templates, constraints = TemplateProcess(), ConstraintProcess()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmrun.engine.engine.TemplateProcess", lambda: templates)
        patch.setattr("llmrun.engine.constraint.matcher.ConstraintProcess", lambda: constraints)
        yield
    templates.close()
    constraints.close()
