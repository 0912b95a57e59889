"""Runs several requests that differ only in their seeds, and prints their answers in the order of the seeds.

The best of the samples can be chosen by a vote or by the mean log probability.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from llmrun.base.amounts import (
    counted,
    format_number,
    format_roughly,
    format_seconds_briefly,
    format_seconds_roughly,
)
from llmrun.base.errors import LlmrunError
from llmrun.base.types import FinishReason
from llmrun.cli.answers.answering import CollectedAnswer, cancelling, is_remote
from llmrun.cli.answers.report import (
    AnsweredRequest,
    check_format,
    completion_body,
    fitting_fields,
    logprob_fields,
    model_words,
    prompt_reporter,
)
from llmrun.cli.arguments.generating import MEAN_LOGPROB, VOTE, SamplesWanted
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal, room
from llmrun.engine.requests import Failed, Finished, PrefillProgress, Request, TextDelta

if TYPE_CHECKING:
    from llmrun.engine.base import Answering
    from llmrun.engine.requests import Event


@dataclass(frozen=True, slots=True)
class Best:
    """The sample that was chosen.

    rule   how the sample was chosen: MEAN_LOGPROB or VOTE
    index  the sample's index among all samples
    votes  the number of votes for each sample's text, by index; empty unless the rule is VOTE
    mean   the sample's mean log probability for MEAN_LOGPROB, or None if unknown
    """

    rule: str
    index: int
    votes: Sequence[int] = ()
    mean: float | None = None


def best_of_vote(texts: Sequence[str], complete: Sequence[int]) -> Best:
    """Choose the most frequent text. Ties go to the lowest index. Leading and trailing white space is ignored.

    complete  the indexes of the samples that may vote and be chosen
    """
    counts = Counter(texts[index].strip() for index in complete)
    votes = [counts[text.strip()] if index in complete else 0 for index, text in enumerate(texts)]
    return Best(VOTE, max(complete, key=votes.__getitem__), votes)


def best_of_mean_logprob(means: Sequence[float | None], complete: Sequence[int]) -> Best:
    """Choose the sample with the highest mean log probability. Ties go to the lowest index."""
    known = {index: mean for index, mean in enumerate(means) if index in complete and mean is not None}
    index = max(complete, key=lambda each: known.get(each, float("-inf")))
    return Best(MEAN_LOGPROB, index, mean=known.get(index))


def samples_body(
    answered: Sequence[AnsweredRequest], means: Sequence[float | None], best: Best | None
) -> dict[str, Any]:
    """Return the JSON object for all samples, in the order of their seeds.

    means  the mean log probability of each sample's tokens (natural logarithm), or None if unknown
    """
    bodies = [completion_body(done) for done in answered]
    samples = [
        {
            "index": index,
            "seed": body["seed"],
            "text": done.text,
            "reasoning": done.reasoning or None,
            "finish_reason": str(done.finished.reason),
            "mean_logprob": None if mean is None else max(mean, -9999.0),  # the lowest value in OpenAI's API
            "votes": best.votes[index] if best is not None and best.votes else None,
            "logprobs": body["choices"][0]["logprobs"],
            "usage": body["usage"],
            "timings": body["timings"],
        }
        for index, (done, body, mean) in enumerate(zip(answered, bodies, means, strict=True))
    ]
    run = {name: value for name, value in bodies[0]["run"].items() if name != "context_used"}
    return {
        "id": f"samples-{uuid.uuid4().hex}",
        "object": "llmrun.samples",
        "created": int(time.time()),
        "model": answered[0].model,
        "samples": samples,
        "best": None if best is None else {"rule": best.rule} | _without_details(samples[best.index]),
        "timings": {
            "load_s": answered[0].finished.timings.load_s,
            "total_s": _total_s(answered),
            "tokens_per_second": _tokens_per_second(answered),
        },
        "run": run,
    }


def _without_details(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in ("index", "seed", "text", "mean_logprob", "votes")}


def samples_fields(answered: Sequence[AnsweredRequest], best: Best | None) -> list[str]:
    """Return the combined statistics of all samples. Without --verbose, the statistics fit on one line."""
    if not (out.stats or out.verbose):
        return [_short_line(answered, best)]
    facts = _facts(answered, best)
    return list(facts.values()) if out.verbose else fitting_fields(facts, room(sys.stderr))


def _short_line(answered: Sequence[AnsweredRequest], best: Best | None) -> str:
    """Return a line for people, such as `3 samples, 640 tokens in 9.1 s, 70 tok/s`."""
    written = f"{counted(len(answered), 'sample')}, {counted(_generated(answered), 'token')}"
    line = f"{written} in {format_seconds_roughly(_total_s(answered))}"
    if speed := _tokens_per_second(answered):
        line += f", {format_roughly(speed)} tok/s"
    return line if best is None else f"{line}, {_best_words(answered, best)}"


def _facts(answered: Sequence[AnsweredRequest], best: Best | None) -> dict[str, str]:
    first = answered[0].finished.timings
    generated = _generated(answered)
    facts = {"model": model_words(answered[0].model, answered[0].info)}
    if generated and first.prompt_tokens:
        computed = first.prompt_tokens - first.cached_tokens
        facts["prompt"] = f"{computed} in {format_number(first.prompt_per_second)}/s"
        facts["TTFT"] = f"TTFT {format_seconds_briefly(first.ttft_s)}"
    facts["samples"] = counted(len(answered), "sample")
    speed = _tokens_per_second(answered)
    facts["written"] = f"{generated} out" + (f" {format_number(speed)}/s" if speed else "")
    facts["total"] = format_seconds_briefly(_total_s(answered))
    if (seed := answered[0].request.seed) is not None:
        facts["seed"] = f"seed {seed}" + (f" to {answered[-1].request.seed}" if len(answered) > 1 else "")
    if best is not None:
        facts["best"] = _best_words(answered, best)
    return facts


def _best_words(answered: Sequence[AnsweredRequest], best: Best) -> str:
    seed = answered[best.index].request.seed
    which = f"sample {best.index + 1}" if seed is None else f"seed {seed}"
    if best.rule == VOTE:
        return f"best {which} ({best.votes[best.index]} of {len(answered)} votes)"
    return f"best {which}" + ("" if best.mean is None else f" (mean logprob {round(best.mean, 2) + 0.0:.2f})")


def _generated(answered: Sequence[AnsweredRequest]) -> int:
    return sum(done.finished.timings.generated_tokens for done in answered)


def _total_s(answered: Sequence[AnsweredRequest]) -> float:
    return max(done.finished.timings.total_s for done in answered)


def _tokens_per_second(answered: Sequence[AnsweredRequest]) -> float:
    """Return the combined speed of all samples after the first token, or 0 if there was at most one token."""
    began = [done.finished.timings.ttft_s for done in answered if done.finished.timings.generated_tokens]
    seconds = _total_s(answered) - min(began, default=0.0)
    return (_generated(answered) - 1) / seconds if began and seconds > 0 else 0.0


def answer_samples(
    engine: Answering,
    request: Request,
    wanted: SamplesWanted,
    *,
    model: str,
    as_json: bool,
    hide_thinking: bool,
    log: Callable[[AnsweredRequest], None] | None,
) -> int:
    """Run the samples, print the answers and their statistics, and return the exit code.

    Ctrl-C or SIGTERM stops the samples. Complete samples are still printed.

    model  the model's display name
    log    a function to call with each printed answer, or None
    """
    _tell_of_equal_samples(engine, request, wanted.count)
    run = _Run(engine, request, wanted, model, log, as_json=as_json, hide_thinking=hide_thinking)
    with cancelling(engine.cancel_current) as signals, prompt_reporter(engine, request) as waiting:
        run.submit()
        while not engine.idle:
            for event in engine.step():
                if not isinstance(event, PrefillProgress):
                    waiting.end()
                run.take(event)
            run.show_progress()
    run.end()
    return 128 + signals[0] if signals else 0


class _Run:
    """The samples of one run, by seed."""

    def __init__(
        self,
        engine: Answering,
        request: Request,
        wanted: SamplesWanted,
        model: str,
        log: Callable[[AnsweredRequest], None] | None,
        *,
        as_json: bool,
        hide_thinking: bool,
    ) -> None:
        self._engine, self._wanted, self._model, self._log = engine, wanted, model, log
        self._as_json, self._hide_thinking = as_json, hide_thinking
        first = request.sampling
        seeds = range(first.seed, first.seed + wanted.count)
        self._requests = [structs.replace(request, sampling=replace(first, seed=seed)) for seed in seeds]
        self._collected = [CollectedAnswer() for _ in seeds]
        self._done: list[AnsweredRequest | None] = [None] * wanted.count
        self._indexes: dict[int, int] = {}  # indexes of the samples by request id
        self._n_shown = 0
        # Log probabilities are requested only if they are needed, because computing them takes time for every token.
        needs_logprobs = wanted.best_of == MEAN_LOGPROB
        self._logprobs = 0 if request.logprobs is None and needs_logprobs else request.logprobs

    def submit(self) -> None:
        for index, request in enumerate(self._requests):
            self._indexes[self._engine.submit(structs.replace(request, logprobs=self._logprobs))] = index

    def take(self, event: Event) -> None:
        """Record an event, and print the answers that are complete. Raises the error of a failed request."""
        index = self._indexes[event.request_id]
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, TextDelta):
            self._collected[index].take(event)
        elif isinstance(event, Finished):
            self._done[index] = self._collected[index].answered(self._engine, self._model, self._requests[index], event)
            if self._wanted.best_of is None and not self._as_json:
                self._show_in_order()

    def show_progress(self) -> None:
        n_done = sum(done is not None for done in self._done)
        if any(each.pieces for each in self._collected):
            n_deltas = sum(len(each.pieces) for each in self._collected)
            out.progress(f"samples    {n_done} of {len(self._done)} complete, {n_deltas} tokens")

    def end(self) -> None:
        """Print the remaining output and the statistics. Raises LlmrunError if an answer has the wrong format."""
        answered = [done for done in self._done if done is not None]
        if len(answered) < len(self._done):
            raise LlmrunError("the engine stopped without finishing all samples")
        complete = [index for index, done in enumerate(answered) if _is_complete(done)]
        best = self._best(answered, complete)
        if self._as_json:
            out.json(samples_body(answered, self._means(), best))
        elif best is not None:
            self._show(answered[best.index])
        if self._as_json and self._log is not None:
            for index in complete if best is None else [best.index]:
                self._log(answered[index])
        if len(complete) < len(answered):
            out.note(f"stopped when {len(complete)} of {len(answered)} samples were complete")
        _explain_lengths(answered, as_json=self._as_json)
        out.fields(samples_fields(answered, best))
        for done in [answered[best.index]] if best else answered:
            check_format(done)

    def _show_in_order(self) -> None:
        while self._n_shown < len(self._done) and (done := self._done[self._n_shown]) is not None:
            self._n_shown += 1
            if not _is_complete(done):
                continue
            if not self._wanted.null:
                seed = "" if done.request.seed is None else f", seed {done.request.seed}"
                out.lines([f"--- sample {self._n_shown} of {len(self._done)}{seed}"], dim=True)
            self._show(done)

    def _show(self, done: AnsweredRequest) -> None:
        if not self._hide_thinking:
            out.thinking(done.reasoning)
        out.answer(done.text)
        out.end_answer("\0" if self._wanted.null else "\n")
        if done.request.logprobs is not None:
            for token in done.logprobs:
                out.fields(logprob_fields(token))
        if self._log is not None:
            self._log(done)

    def _means(self) -> list[float | None]:
        """Return the mean log probability of each sample's tokens, or None if it is unknown."""
        values = [[token.chosen.logprob for token in each.logprobs] for each in self._collected]
        return [sum(each) / len(each) if each else None for each in values]

    def _best(self, answered: Sequence[AnsweredRequest], complete: Sequence[int]) -> Best | None:
        """Choose the sample to print, or return None if all are printed or none is complete. Raises LlmrunError."""
        if self._wanted.best_of is None or not complete:
            return None
        if self._wanted.best_of != MEAN_LOGPROB:
            return best_of_vote([done.text for done in answered], complete)
        means = self._means()
        if is_remote(self._engine) and all(means[index] is None for index in complete):
            raise LlmrunError(
                f"--best-of {MEAN_LOGPROB}: {self._engine.info.device} sent no log probabilities",
                hint="use --best-of vote",
            )
        return best_of_mean_logprob(means, complete)


def _is_complete(done: AnsweredRequest) -> bool:
    return done.finished.reason is not FinishReason.CANCELLED


def _tell_of_equal_samples(engine: Answering, request: Request, count: int) -> None:
    sampling = request.sampling
    if count == 1:
        return
    if sampling.temperature == 0 and request.sends("temperature"):
        out.note("temperature 0 makes all samples equal; use --temp to set a higher temperature")
    elif sampling.top_k == 1 and not is_remote(engine):
        out.note("--top-k 1 makes all samples equal")


def _explain_lengths(answered: Sequence[AnsweredRequest], *, as_json: bool) -> None:
    """Print a note if answers were cut off. The user's own token limit is mentioned only on a terminal."""
    cut = [done for done in answered if done.finished.reason is FinishReason.LENGTH]
    asked = answered[0].request.max_tokens
    by_limit = [done for done in cut if asked is not None and done.finished.timings.generated_tokens >= asked]
    if len(by_limit) < len(cut):
        out.note(f"{len(cut) - len(by_limit)} of {len(answered)} answers were cut off: the context is full")
    if by_limit and is_terminal(sys.stderr) and not as_json:
        out.note(f"{len(by_limit)} of {len(answered)} answers were cut off (--max-tokens sets the limit)")
