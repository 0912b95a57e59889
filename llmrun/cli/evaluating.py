"""Implements `llmrun eval`, which shows progress and prints the results as text or JSON.

After Ctrl-C, the results measured so far are printed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from llmrun.backends.base import AUTO, beyond_training
from llmrun.base.amounts import counted, format_bytes, format_clock, format_seconds
from llmrun.base.errors import Cancelled, kernel_warnings_told
from llmrun.cli.answers.answering import cancelling, model_files, smaller_ones_named, tell_of_too_many_threads
from llmrun.cli.console.output import out
from llmrun.jobs.bench.intervals import ENOUGH_PARTS
from llmrun.jobs.evaluation.choices import Accuracy, Answered, ChoiceScorer, accuracy_of, context_for
from llmrun.jobs.evaluation.measuring import PERCENTILES, Source, chunks_of, opened, scores_of_chunks, summarized
from llmrun.options.settings import Settings

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.base.types import ModelInfo
    from llmrun.jobs.bench.intervals import Interval
    from llmrun.jobs.evaluation.choices import Question
    from llmrun.jobs.evaluation.measuring import Comparison, Perplexity, TextResult


_LABEL = 17  # width in columns


@dataclass(frozen=True, slots=True)
class Report:
    """The results of an evaluation.

    names     the names of the model and of its base, if any
    models    information about the model and the base
    context   tokens in each chunk of the text
    text      the result for the text, or None
    answers   the answers of each model to the same questions; empty if there are no questions
    seconds   the duration without loading
    complete  whether all chunks and questions were evaluated
    """

    names: Sequence[str]
    models: Sequence[ModelInfo]
    context: int
    text: TextResult | None
    answers: Sequence[Sequence[Answered]]
    seconds: float
    complete: bool


# --- Text -------------------------------------------------------------------------------------------------------------


def _lines(report: Report) -> Iterator[str]:
    for label, name, info in zip(("model", "base"), report.names, report.models, strict=False):
        yield _line(
            label, f"{name}  {info.backend}, {info.device}, KV cache {info.kv_type}{_weights(info)}{_adapters(info)}"
        )
    if len(report.models) > 1 and (saved := _size_of_base(*report.models)):
        yield _line("size", saved)
    if report.text is not None:
        yield from _text_lines(report.text, report.context)
    if report.answers:
        yield from _answer_lines(report.answers)
    yield _line("time", format_seconds(report.seconds))


def _weights(info: ModelInfo) -> str:
    """Return a description of a model's weights, or "" for a stand-in, which has no weights."""
    if not info.weight_bytes:
        return ""
    return f", {info.file_type}, {format_bytes(info.file_bytes)}, {info.bits_per_weight:.2f} bits per weight"


def _adapters(info: ModelInfo) -> str:
    """Return the names and scales of a model's LoRA adapters, or "" for a model without adapters."""
    return "".join(f", {adapter.name} (scale {adapter.scale:g})" for adapter in info.adapters)


def _size_of_base(model: ModelInfo, base: ModelInfo) -> str:
    """Return the size of a model compared with its base, or "" if both are the same file."""
    if not base.weight_bytes or model.path == base.path:
        return ""
    return f"{_percent(model.file_bytes / base.file_bytes)} of the base"


def _text_lines(text: TextResult, context: int) -> Iterator[str]:
    size = f"{counted(text.chunks, 'chunk')} of {context:,} tokens, {text.scored:,} tokens scored"
    is_enough = text.chunks >= ENOUGH_PARTS
    yield _line("text", size if is_enough else f"{size}; too few for intervals, which need {ENOUGH_PARTS} chunks")
    yield _line("perplexity", _with_interval(text.model.value, "{:.4f}".format))
    if text.base is None or text.comparison is None:
        return
    found = text.comparison
    yield _line("of the base", _with_interval(text.base.value, "{:.4f}".format))
    yield _line("ratio", _with_interval(found.ratio, "{:.4f}".format))
    yield _line("KL divergence", _with_interval(found.divergence, "{:.6f}".format))
    spread = [f"{number:g} %: {value:.6f}" for number, value in zip(PERCENTILES, found.percentiles, strict=True)]
    yield _line("", f"{', '.join(spread)}, maximum: {found.maximum:.6f}")
    yield _line("same top token", _with_interval(found.same_top, _percent))


def _answer_lines(answers: Sequence[Sequence[Answered]]) -> Iterator[str]:
    yield _line("questions", f"{len(answers[0]):,}")
    for owner, given in zip(("accuracy", "of the base"), answers, strict=False):
        found = accuracy_of(given)
        yield _line(owner, _with_interval(found.accuracy, _percent))
        yield _line("  by length", _with_interval(found.by_length, _percent))
    if len(answers) == 2:
        changed = _changes(*answers)
        yield _line(
            "other choices",
            f"{changed['different']:,}; {changed['gained']:,} became right, {changed['lost']:,} became wrong",
        )


def _changes(model: Sequence[Answered], base: Sequence[Answered]) -> dict[str, int]:
    """Return how many choices differ from the base's choices, and how many answers became right or wrong."""
    pairs = list(zip(model, base, strict=True))
    return {
        "different": sum(one.chosen != other.chosen for one, other in pairs),
        "gained": sum(one.is_right and not other.is_right for one, other in pairs),
        "lost": sum(other.is_right and not one.is_right for one, other in pairs),
    }


def _line(label: str, text: str) -> str:
    return f"{label:{_LABEL}}{text}"


def _with_interval(found: Interval, written: Callable[[float], str]) -> str:
    if math.isinf(found.high):
        return written(found.estimate)
    return f"{written(found.estimate)}  (95 %: {written(found.low)} to {written(found.high)})"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


# --- JSON -------------------------------------------------------------------------------------------------------------


def _body(report: Report) -> dict[str, Any]:
    models = [_model(name, info) for name, info in zip(report.names, report.models, strict=True)]
    return {
        "model": models[0],
        "base": models[1] if len(models) > 1 else None,
        "complete": report.complete,
        "seconds": round(report.seconds, 3),
        "text": None if report.text is None else _text_body(report.text, report.context),
        "choices": _answers_body(report.answers) if report.answers else None,
    }


def _model(name: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "name": name,
        "path": info.path,
        "file_type": info.file_type,
        "bytes": info.file_bytes,
        "bits_per_weight": round(info.bits_per_weight, 4),
        "adapters": [{"name": each.name, "path": each.path, "scale": each.scale} for each in info.adapters],
        "backend": info.backend,
        "device": info.device,
        "gpu_layers": info.gpu_layers,
        "kv_type": info.kv_type,
    }


def _text_body(text: TextResult, context: int) -> dict[str, Any]:
    return {
        "context": context,
        "chunks": text.chunks,
        "scored_tokens": text.scored,
        "perplexity": _perplexity(text.model),
        "base_perplexity": None if text.base is None else _perplexity(text.base),
        **({} if text.comparison is None else _comparison(text.comparison)),
    }


def _perplexity(found: Perplexity) -> dict[str, float | None]:
    return {**_interval(found.value), "token_error": found.token_error}


def _comparison(found: Comparison) -> dict[str, Any]:
    percentiles = {f"p{number:g}": value for number, value in zip(PERCENTILES, found.percentiles, strict=True)}
    return {
        "perplexity_ratio": _interval(found.ratio),
        "kl_divergence": {**_interval(found.divergence), **percentiles, "maximum": found.maximum},
        "same_top": _interval(found.same_top),
    }


def _answers_body(answers: Sequence[Sequence[Answered]]) -> dict[str, Any]:
    model, *others = (_accuracy(accuracy_of(given)) for given in answers)
    questions = [
        {
            "line": given[0].question.line,
            "answer": given[0].question.answer,
            "scores": given[0].scores,
            **({"base_scores": given[1].scores} if others else {}),
        }
        for given in zip(*answers, strict=True)
    ]
    return {
        "questions": len(questions),
        **model,
        **({"base": others[0], **_changes(*answers)} if others else {}),
        "answers": questions,
    }


def _accuracy(found: Accuracy) -> dict[str, Any]:
    return {"acc": _interval(found.accuracy), "acc_norm": _interval(found.by_length)}


def _interval(found: Interval) -> dict[str, float | None]:
    """Return an interval for JSON, whose ends are null if there is too little data."""
    if math.isinf(found.high):
        return {"value": found.estimate, "low": None, "high": None}
    return {"value": found.estimate, "low": found.low, "high": found.high}


Part = TypeVar("Part")
_LONGEST_CONTEXT = 8192  # the maximum context for questions, in tokens
_MOST_SEQUENCES = 9  # sequences in one pass: a prompt and the choices that are scored with it


@dataclass(frozen=True, slots=True)
class Task:
    """A text and questions to evaluate.

    text       the text to predict, or None
    context    tokens in each chunk of the text
    most       the maximum number of chunks, or None for all
    questions  the questions to answer; may be empty if there is a text
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
    if as_json and (scores or answers):
        out.json(_body(report))
    elif scores or answers:
        out.lines(_lines(report))
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
    """Show the progress while collecting the parts, and return the parts. Stops after a signal."""
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
    """Open the model and its base, if any. Yields their names and the open backends, the model first."""
    wanted = [settings] if base is None else [settings, base]
    context, sequences = task.context, 1
    if task.questions:
        sequences = min(_MOST_SEQUENCES, 1 + max(len(question.endings) for question in task.questions))
        context = max(context, min(_LONGEST_CONTEXT, context_for(task.questions)))
    with ExitStack() as held:
        sized = [replace(one, ctx_size=context) for one in wanted]
        files = [held.enter_context(model_files(one, sequences=sequences)) for one in sized]
        found = [one.found for one in files]
        tell_of_too_many_threads(settings)
        model, *others = (
            Source(
                one.found.path,
                replace(
                    one.options,
                    max_sequences=sequences,
                    kv_tokens=AUTO if sequences > 1 else None,
                    progress=one.loading,
                    explain=_explain,
                ),
            )
            for one in files
        )
        with kernel_warnings_told(out.note), smaller_ones_named(found[0].entry):
            backends = held.enter_context(opened(model, others[0] if others else None))
        if others:
            out.clear_progress()
        else:
            files[0].loading.end()
        for one, backend in zip(found, backends, strict=True):
            out.detail(f"model      {one.name}: {backend.info.path}")
            out.detail(f"backend    {backend.info.backend}: {backend.info.device}, KV cache {backend.info.kv_type}")
            if words := beyond_training(one.name, task.context, backend.info.train_context):
                out.note(words)
        yield [one.name for one in found], backends


def _explain(words: str) -> None:
    out.detail(f"backend    {words}")
