"""Checks that a finished answer has the format that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.base.errors import InvalidAnswer
from llmrun.base.types import FinishReason
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.answers.report import AnsweredRequest


def check_format(done: AnsweredRequest) -> None:
    """Raise InvalidAnswer if an answer does not have the request's format, because it was cut off or is invalid.

    Print a note if it could not be validated. Answers that the user cancelled are not checked.
    """
    wanted, finished = done.request.response_format, done.finished
    if wanted is None or finished.reason is FinishReason.CANCELLED:
        return
    if finished.reason is FinishReason.LENGTH:
        raise InvalidAnswer(
            f"the answer is incomplete: it was cut off after {finished.timings.generated_tokens} tokens, "
            f"before it matched {wanted.origin}",
            hint="raise --max-tokens or --ctx-size, or let the format limit the length of its parts",
        )
    if finished.stop is not None:
        raise InvalidAnswer(f"the answer is incomplete: a stop string cut it off before it matched {wanted.origin}")
    if wanted.schema is None:
        return
    from llmrun.engine.constraint.validation import validate

    verdict = validate(done.text, wanted.schema)
    if verdict.kind == "invalid":
        raise InvalidAnswer(f"the answer does not match {wanted.origin}: {verdict.reason}")
    if verdict.kind == "not validated":
        out.note(f"the answer was not validated: {verdict.reason}")
