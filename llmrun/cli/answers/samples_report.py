"""Chooses the best of several samples, and reports on all of them."""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmrun.base.amounts import format_number, format_seconds_briefly
from llmrun.cli.answers.report import AnsweredRequest, completion_body, fitting_fields, model_words
from llmrun.cli.arguments.samples import MEAN_LOGPROB, VOTE
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import room


@dataclass(frozen=True, slots=True)
class Best:
    """The sample that was chosen.

    rule   how it was chosen: MEAN_LOGPROB or VOTE
    index  its index among all samples
    votes  the number of votes for each sample's text, by index; empty unless the rule is VOTE
    mean   its mean log probability, or None if unknown; only for MEAN_LOGPROB
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
            "mean_logprob": None if mean is None else max(mean, -9999.0),  # as in OpenAI's log probabilities
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
    """Return the statistics of all samples together. Without --verbose, they fit on one line of the terminal."""
    facts = _facts(answered, best)
    return list(facts.values()) if out.verbose else fitting_fields(facts, room(sys.stderr))


def _facts(answered: Sequence[AnsweredRequest], best: Best | None) -> dict[str, str]:
    first = answered[0].finished.timings
    generated = _generated(answered)
    facts = {"model": model_words(answered[0].model, answered[0].info)}
    if generated and first.prompt_tokens:
        computed = first.prompt_tokens - first.cached_tokens
        facts["prompt"] = f"{computed} in {format_number(first.prompt_per_second)}/s"
        facts["TTFT"] = f"TTFT {format_seconds_briefly(first.ttft_s)}"
    facts["samples"] = f"{len(answered)} samples" if len(answered) > 1 else "1 sample"
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
    """Return the speed of all samples together after the first token, or 0 if there was at most one token."""
    began = [done.finished.timings.ttft_s for done in answered if done.finished.timings.generated_tokens]
    seconds = _total_s(answered) - min(began, default=0.0)
    return (_generated(answered) - 1) / seconds if began and seconds > 0 else 0.0
