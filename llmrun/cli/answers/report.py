"""Checks an answer's format, and reports on the answer in a short line, as statistics or as JSON in OpenAI's format.

Also describes the sampling.
"""

from __future__ import annotations

import math
import sys
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from llmrun.base.amounts import (
    counted,
    format_number,
    format_percent,
    format_roughly,
    format_seconds_briefly,
    format_seconds_roughly,
)
from llmrun.base.errors import InvalidAnswer
from llmrun.base.types import FinishReason, ModelInfo, Timings, TokenLogprob
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import LiveReporter
from llmrun.cli.console.terminal import room, width
from llmrun.engine.requests import (
    FillPrompt,
    Finished,
    MixedPrompt,
    PrefillProgress,
    Request,
    TokenLogprobs,
    TokenPrompt,
)
from llmrun.options.sampling_params import SAMPLING, value_text

if TYPE_CHECKING:
    from llmrun.engine.base import Answering
    from llmrun.options.sampling_params import SamplingParams


class AnsweredRequest(Struct, frozen=True):
    """A finished request with all the data for its report.

    model   the model's display name
    tokens  the ids of the answer's tokens, without an end-of-generation token; servers send no ids
    """

    model: str
    info: ModelInfo
    request: Request
    text: str
    logprobs: Sequence[TokenLogprobs]
    finished: Finished
    reasoning: str = ""
    tokens: Sequence[int] = ()


def check_format(done: AnsweredRequest) -> None:
    """Raise InvalidAnswer if an answer is truncated or otherwise does not match the requested format.

    Print a note if the answer could not be validated. Answers that the user cancelled are not checked.
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
    from llmrun.engine.constraint.process import validate

    verdict = validate(done.text, wanted.schema)
    if verdict.kind == "invalid":
        raise InvalidAnswer(f"the answer does not match {wanted.origin}: {verdict.reason}")
    if verdict.kind == "not validated":
        out.note(f"the answer was not validated: {verdict.reason}")


# The statistics that are dropped if the line is too long, least important first.
_DROPPED = ("TPOT", "prompt", "images", "first answer", "model", "context", "accepted", "total", "TTFT", "steps")


NEARLY_FULL = 0.9  # if this share of the context is in use, the closing line says so
# If the first token takes this long and this share of the time, the closing line mentions it. Otherwise, the number of
# tokens divided by the time would seem to contradict the speed.
_LONG_WAIT_S, _LONG_WAIT = 0.3, 0.2


def show_statistics(answer: AnsweredRequest) -> None:
    """Print the closing line: a short line, or with --stats or --verbose a line of detailed statistics.

    With --verbose or in a log file, the line contains all statistics. On a terminal, it contains the most important
    statistics that fit.
    """
    if not (out.stats or out.verbose):
        out.fields([short_line(answer)])
        return
    timings = answer.finished.timings
    if timings.drafted_tokens:
        out.detail(
            f"drafts     {timings.accepted_tokens} of {counted(timings.drafted_tokens, 'token')} accepted; "
            f"{counted(timings.generated_tokens, 'token')} in {counted(timings.steps, 'step')}"
        )
    limit = sys.maxsize if out.verbose else room(sys.stderr)
    out.fields(stats_fields(answer, limit))


def short_line(answer: AnsweredRequest) -> str:
    """Return a line for people, such as `212 tokens in 9.1 s, 23 tok/s`.

    A long wait for the first token and a nearly full context are mentioned, too.
    """
    timings, info, thinking = answer.finished.timings, answer.info, answer.finished.thinking_tokens
    if timings.generated_tokens == 0:
        return f"{_stopped_early(answer)} {format_seconds_roughly(timings.total_s)}"
    line = counted(timings.generated_tokens, "token")
    if answer.finished.reason is FinishReason.CANCELLED:
        line = f"stopped after {line}"
    if thinking:
        line += f" ({thinking:,} thinking)"
    line += f" in {format_seconds_roughly(timings.total_s)}"
    if timings.decode_s > 0:  # at least two steps are needed to compute a speed
        if timings.ttft_s >= max(_LONG_WAIT_S, _LONG_WAIT * timings.total_s):
            line += f" (the first after {format_seconds_roughly(timings.ttft_s)})"
        line += f", {format_roughly(timings.decode_per_second)} tok/s"
    if info.context_size and (used := answer.finished.context_used / info.context_size) >= NEARLY_FULL:
        line += f", context {format_percent(used)} full"
    return line


def _stopped_early(answer: AnsweredRequest) -> str:
    """Return the beginning of a sentence about an answer that was stopped before its first token."""
    return f"stopped {'in prefill' if answer.info.context_size else 'before the answer began,'} after"


def fitting_fields(facts: dict[str, str], limit: int) -> list[str]:
    """Return only the most important statistics, as many as fit on a line of `limit` columns."""
    facts = dict(facts)
    for name in _DROPPED:
        if width("  ".join(facts.values())) > limit:
            facts.pop(name, None)
    return list(facts.values())


def stats_fields(answer: AnsweredRequest, limit: int = sys.maxsize) -> list[str]:
    """Return the most important statistics of an answer, as many as fit on a line of `limit` columns.

    All statistics usually fit on one line of 100 columns.
    """
    return fitting_fields(_facts(answer), limit)


def _facts(answer: AnsweredRequest) -> dict[str, str]:
    """Return the statistics by name. TTFT is the time to first token, and TPOT the time per output token."""
    timings, info = answer.finished.timings, answer.info
    name = model_words(answer.model, info)
    seed = {} if answer.request.seed is None else {"seed": f"seed {answer.request.seed}"}
    if timings.generated_tokens == 0:
        stopped = f"{_stopped_early(answer)} {format_seconds_briefly(timings.total_s)}"
        return {"model": name, "written": stopped} | seed
    facts = {"model": name}
    if answer.finished.reason is FinishReason.CANCELLED:
        facts["stopped"] = "stopped"
    if timings.prompt_tokens:  # some servers do not report the number of prompt tokens
        computed = timings.prompt_tokens - timings.cached_tokens
        facts["prompt"] = f"{computed} in {format_number(timings.prompt_per_second)}/s"
    if timings.encoded_images:
        facts["images"] = f"{counted(timings.encoded_images, 'image')} {format_seconds_briefly(timings.encode_s)}"
    facts["TTFT"] = f"TTFT {format_seconds_briefly(timings.ttft_s)}"
    thinking, first_answer = answer.finished.thinking_tokens, answer.finished.first_answer_s
    if thinking and first_answer:
        facts["first answer"] = f"answer after {format_seconds_briefly(first_answer)}"
    facts["written"] = f"{timings.generated_tokens} out" + (f" ({thinking} thinking)" if thinking else "")
    if timings.decode_s > 0:  # at least two steps are needed to compute a speed
        facts["written"] += f" {format_number(timings.decode_per_second)}/s"
        facts["TPOT"] = f"TPOT {format_seconds_briefly(timings.tpot_s)}"
    several = timings.steps < timings.generated_tokens
    if several and (timings.accepted_tokens or timings.forced_tokens):
        facts["steps"] = f"{format_number(timings.tokens_per_step)}/step"
    if several and timings.accepted_tokens:
        facts["accepted"] = f"{format_percent(timings.accepted_tokens / timings.drafted_tokens)} accepted"
    facts["total"] = format_seconds_briefly(timings.total_s)
    if info.context_size:
        facts["context"] = f"ctx {format_percent(answer.finished.context_used / info.context_size)}"
    return facts | seed


def stats_lines(answer: AnsweredRequest) -> list[str]:
    """Return all statistics of an answer as lines for people."""
    timings, info, finished = answer.finished.timings, answer.info, answer.finished
    lines = [f"model       {model_words(answer.model, info, sys.maxsize)}"]
    if timings.prompt_tokens:  # some servers do not report the number of prompt tokens
        computed = timings.prompt_tokens - timings.cached_tokens
        speed = f" at {format_number(timings.prompt_per_second)} tok/s" if computed else ""
        lines.append(f"prompt      {computed:,} tokens computed{speed}, {timings.cached_tokens:,} cached")
    if timings.encoded_images:
        seconds = format_seconds_briefly(timings.encode_s)
        lines.append(f"images      {timings.encoded_images} encoded in {seconds}")
    if timings.generated_tokens:
        thinking = f" ({finished.thinking_tokens:,} thinking)" if finished.thinking_tokens else ""
        lines.append(f"answer      {counted(timings.generated_tokens, 'token')}{thinking}")
        lines.append(f"TTFT        {format_seconds_briefly(timings.ttft_s)}")
    if finished.thinking_tokens and finished.first_answer_s:
        lines[-1] += f"; the answer began after {format_seconds_briefly(finished.first_answer_s)}"
    if timings.decode_s > 0:
        pace = format_seconds_briefly(timings.tpot_s)
        lines.append(f"decode      {format_number(timings.decode_per_second)} tok/s, TPOT {pace}")
    if timings.drafted_tokens:
        accepted = f"{timings.accepted_tokens:,} of {timings.drafted_tokens:,} tokens accepted"
        lines.append(f"drafts      {accepted}, {format_number(timings.tokens_per_step)} tokens per step")
    lines.append(f"time        {format_seconds_briefly(timings.total_s)}, finish reason {finished.reason}")
    if info.context_size:
        share = format_percent(finished.context_used / info.context_size)
        lines.append(f"context     {finished.context_used:,} of {info.context_size:,} tokens ({share})")
    if answer.request.seed is not None:
        lines.append(f"seed        {answer.request.seed}")
    return lines


def explain_length(done: AnsweredRequest, *, thinking: str, limit: str, context: str, reset: str = "") -> None:
    """Print a note that explains why an answer was cut off. Do nothing if the answer is complete.

    thinking, limit, context  advice on long thinking, the user's token limit and a full context; if `limit` is empty,
                              no note about the token limit is printed
    reset                     additional advice on a context that is or may be full
    """
    if done.finished.reason is not FinishReason.LENGTH:
        return
    info, asked, timings = done.info, done.request.max_tokens, done.finished.timings
    if done.reasoning and not done.text:
        advice = "" if info.backend == "remote" else f": {thinking}"
        out.note(f"the answer was cut off while the model was thinking{advice}")
    # Without a token count from the server, the number of chunks is used, and a chunk may hold several tokens.
    if asked is not None and (timings.generated_tokens >= asked or not timings.prompt_tokens):
        if limit:
            out.note(f"the answer was cut off after {counted(timings.generated_tokens, 'token')}: {limit}")
    elif not info.context_size:
        out.note(f"the answer was cut off by {info.device}: its context or its token limit may be exhausted{reset}")
    else:
        out.note(f"the answer was cut off: the context of {info.context_size:,} tokens is full: {context}{reset}")


def prompt_reporter(engine: Answering, request: Request) -> LiveReporter:
    """Return a reporter that shows the progress of prompts. Call the reporter's `end` when an answer begins."""
    images = {} if isinstance(request.prompt, FillPrompt | TokenPrompt | MixedPrompt) else request.prompt.images
    first = f"reading {'the image' if len(images) == 1 else 'images'}" if images else ""
    reporter = LiveReporter()
    reporter.watch(lambda: (next(map(_waiting_words, engine.prefill_progress()), first), None))
    return reporter


def _waiting_words(prompt: PrefillProgress) -> str:
    if prompt.image is not None:
        return prompt.image.words
    return f"prefill {prompt.done}/{prompt.total}" if prompt.total else "waiting for the server"


def model_words(model: str, info: ModelInfo, limit: int = 24) -> str:
    """Return a model's name and the backend or server that runs the model.

    limit  the maximum length of the name, in characters
    """
    name = model if len(model) <= limit else model[: limit - 1] + "…"
    if info.backend == "remote":
        return f"{name} @ {info.device}"
    return f"{name} {info.backend}" + (f" GPU {info.gpu_layers}" if info.gpu_layers else f"×{info.threads}")


def logprob_fields(token: TokenLogprobs) -> list[str]:
    """Return a token and its probability, followed by the most likely tokens at this position."""
    return [_probability(token.chosen), *map(_probability, token.top)]


def _probability(token: TokenLogprob) -> str:
    return f"{token.text.decode('utf-8', 'backslashreplace')!r} {math.exp(token.logprob):.1%}"


def completion_body(answer: AnsweredRequest) -> dict[str, Any]:
    """Return OpenAI's `chat.completion` object, with extra keys `seed`, `timings` (s, tok/s) and `run` (backend)."""
    timings = answer.finished.timings
    logprobs = None
    if answer.request.logprobs is not None:
        from llmrun.serving.protocol.openai.responses import chat_logprobs

        logprobs = chat_logprobs(answer.logprobs)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answer.model,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": answer.text,
                    "reasoning": answer.reasoning or None,
                    "refusal": None,
                },
                "logprobs": logprobs,
                "finish_reason": str(answer.finished.reason),
            }
        ],
        "usage": {
            "prompt_tokens": timings.prompt_tokens,
            "completion_tokens": timings.generated_tokens,
            "total_tokens": timings.prompt_tokens + timings.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": answer.finished.thinking_tokens},
        },
        "seed": answer.request.seed,
        "timings": {**_timings(timings), "first_answer_s": answer.finished.first_answer_s},
        "run": _run(answer),
    }


_TIMINGS = (
    *("load_s", "prefill_s", "ttft_s", "decode_s", "tpot_s", "total_s", "prompt_per_second", "decode_per_second"),
    *("steps", "tokens_per_step", "drafted_tokens", "accepted_tokens", "forced_tokens"),
    *("encoded_images", "encode_s"),
)


def _timings(timings: Timings) -> dict[str, Any]:
    values = {name: getattr(timings, name) for name in _TIMINGS}
    return values | {name: values[name] or None for name in ("steps", "tokens_per_step")}


def _run(answer: AnsweredRequest) -> dict[str, Any]:
    info = answer.info
    if info.backend == "remote":
        return {"backend": info.backend, "endpoint": info.path, "context_used": answer.finished.context_used}
    return {
        "backend": info.backend,
        "device": info.device,
        "threads": info.threads,
        "gpu_layers": info.gpu_layers or None,
        "context_used": answer.finished.context_used,
        "context_size": info.context_size,
        "kv_type": info.kv_type,
        "warm": answer.finished.timings.load_s == 0,  # a background engine had opened the model before
    }


def described_sampling(sampling: SamplingParams, sent: frozenset[str] | None = None) -> str:
    """Describe the sampling parameters in effect, as in `temperature 0.8, top_k 40, ...`.

    sent  the names of the parameters that are sent to a server; None for local models
    """
    values = {name: getattr(sampling, name) for name in SAMPLING}
    wanted = [
        name
        for name, parameter in SAMPLING.items()
        if (name in sent if sent is not None else not parameter.optional or values[name] != parameter.default)
    ]
    known = ", ".join(f"{name} {value_text(values[name])}" for name in wanted)
    if sent is None:
        return known
    return f"{known}; the server decides the rest" if known else "the server decides"
