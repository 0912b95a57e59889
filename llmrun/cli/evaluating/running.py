"""Runs an evaluation in the terminal: shows its progress, stops on Ctrl-C, and prints what has been measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from llmrun.backends.base import AUTO
from llmrun.backends.trained_context import beyond_training
from llmrun.base.amounts import counted, format_clock
from llmrun.base.errors import Cancelled
from llmrun.base.kernel_warnings import kernel_warnings_told
from llmrun.cli.answers.answering import cancelling
from llmrun.cli.answers.open_model import local_options, model_files, smaller_ones_named, tell_of_too_many_threads
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import show_loading
from llmrun.cli.evaluating.report import Report, show
from llmrun.jobs.evaluation.choices import Answered, ChoiceScorer, context_for
from llmrun.jobs.evaluation.chunks import chunks_of
from llmrun.jobs.evaluation.measuring import scores_of_chunks
from llmrun.jobs.evaluation.opening import Source, opened
from llmrun.jobs.evaluation.results import summarized

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.jobs.evaluation.questions import Question
    from llmrun.options.settings import Settings

Part = TypeVar("Part")
_LONGEST_CONTEXT = 8192  # tokens, for questions
_MOST_SEQUENCES = 9  # a prompt and the choices that are scored in one pass


@dataclass(frozen=True, slots=True)
class Task:
    """A text and questions to evaluate.

    text       the text to predict, or None
    context    tokens in each chunk of the text
    most       the maximum number of chunks, or None for all
    questions  may be empty if there is a text
    """

    text: str | None
    context: int
    most: int | None
    questions: Sequence[Question]


def evaluate(settings: Settings, base: Settings | None, task: Task, *, as_json: bool) -> int:
    """Evaluate a model, compare it with the base if there is one, print the results, and return the exit code.

    Ctrl-C stops the evaluation, and the results so far are printed. Raises any LlmrunError from the hub or a backend.
    """
    with _opened(settings, base, task) as (names, backends):
        model, *others = backends

        def cancel() -> None:
            for backend in backends:
                backend.cancel()

        chunks = [] if task.text is None else chunks_of(task.text, model.tokenizer, task.context, task.most)
        started = time.monotonic()
        with cancelling(cancel) as signals:
            scores = followed(
                scores_of_chunks(model, others[0] if others else None, chunks), len(chunks), "chunk", signals
            )
            answers = followed(_answers(backends, task.questions), len(task.questions), "question", signals)
        out.clear_progress()
        report = Report(
            names=names,
            models=[backend.info for backend in backends],
            context=task.context,
            text=summarized(scores) if scores else None,
            answers=list(zip(*answers, strict=True)),
            seconds=time.monotonic() - started,
            complete=not signals,
        )
    if scores or answers:
        show(report, as_json=as_json)
    if not signals:
        return 0
    done = f"{len(answers):,} of {counted(len(task.questions), 'question')}"
    if not answers:
        done = f"{len(scores):,} of {counted(len(chunks), 'chunk')}"
    out.note(f"stopped after {done}")
    return 128 + signals[0]


def _answers(backends: Sequence[Backend], questions: Sequence[Question]) -> Iterator[tuple[Answered, ...]]:
    """Yield the answers of all models to each question."""
    scorers = [ChoiceScorer(backend) for backend in backends]
    for question in questions:
        yield tuple(scorer.answer(question) for scorer in scorers)


def followed(parts: Iterator[Part], total: int, noun: str, signals: Sequence[int]) -> list[Part]:
    """Show the progress while collecting the parts, and return them. Stops after a signal."""
    done: list[Part] = []
    started = time.monotonic()
    with contextlib.suppress(Cancelled):
        while not signals and (part := next(parts, None)) is not None:
            done.append(part)
            left = (time.monotonic() - started) / len(done) * (total - len(done))
            out.progress(f"{noun} {len(done):,} of {total:,}  {format_clock(left)} left")
    return done


@contextmanager
def _opened(settings: Settings, base: Settings | None, task: Task) -> Iterator[tuple[list[str], list[Backend]]]:
    """Open the model and its base. Yields their names and the open backends, first the model."""
    wanted = [settings] if base is None else [settings, base]
    context, sequences = task.context, 1
    if task.questions:
        sequences = min(_MOST_SEQUENCES, 1 + max(len(question.endings) for question in task.questions))
        context = max(context, min(_LONGEST_CONTEXT, context_for(task.questions)))
    with ExitStack() as held:
        found = [held.enter_context(model_files(one)).found for one in wanted]
        tell_of_too_many_threads(settings)
        model, *others = (
            Source(
                one.path,
                replace(
                    local_options(some),
                    context_size=context,
                    max_sequences=sequences,
                    kv_tokens=AUTO if sequences > 1 else None,
                    progress=show_loading,
                    explain=_explain,
                ),
            )
            for some, one in zip(wanted, found, strict=True)
        )
        with kernel_warnings_told(out.note), smaller_ones_named(found[0].entry):
            backends = held.enter_context(opened(model, others[0] if others else None))
        out.clear_progress()
        for one, backend in zip(found, backends, strict=True):
            out.detail(f"model      {one.name}: {backend.info.path}")
            out.detail(f"backend    {backend.info.backend}: {backend.info.device}, KV cache {backend.info.kv_type}")
            if words := beyond_training(one.name, task.context, backend.info.train_context):
                out.note(words)
        yield [one.name for one in found], backends


def _explain(words: str) -> None:
    out.detail(f"backend    {words}")
