"""Answers of an engine within real schemas: several at once, half of them with drafts, and the verdict on each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmrun.base.errors import InvalidAnswer
from llmrun.base.types import FinishReason
from llmrun.cli.answers.report import AnsweredRequest, check_format
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.process import ConstraintProcess, validate
from llmrun.engine.drafting.base import NO_DRAFT, Draft, Worth
from llmrun.engine.drafting.lookup import LookupDrafter, LookupSource
from llmrun.engine.requests import Failed, Request, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.constraint.random_answers import RandomAnswer
from tests.support.constraint.soak import CompiledSchema, Outcome
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.drafts import drafting_engine

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

SEQUENCES = 8
_CLOSING = (b"}", b"]", b"0", b"")  # beside the quotation mark; the last one is the end of the answer
_PROMPT = range(10, 20)


class DraftsForOdd(LookupSource):
    """Drafts by lookup for the requests with an odd seed."""

    def drafter(self, request: Request) -> LookupDrafter:
        return super().drafter(request) if request.sampling.seed % 2 else _Silent(self)


class _Silent(LookupDrafter):
    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        return NO_DRAFT


def engine_outcomes(
    backend: Backend, schemas: Sequence[CompiledSchema], most_tokens: int, source: random.Random
) -> Iterator[Outcome]:
    """Answer requests with randomly chosen schemas without end, and validate answers that end by themselves.

    Raises AssertionError if the command line would not refuse an answer that was cut off.
    """
    process = ConstraintProcess()
    engine = drafting_engine(backend, DraftsForOdd())
    while True:
        chosen = [source.choice(schemas) for _ in range(SEQUENCES)]
        requests = [_request(backend, each, most_tokens, source) for each in chosen]
        for each, request, gathered in zip(chosen, requests, answer_all(engine, requests), strict=True):
            answer = _answer(gathered)
            verdict = validate(gathered.text, each.schema, process=process) if answer.ended else None
            if not answer.ended and not answer.error:
                _assert_refused(AnsweredRequest("model", backend.info, request, gathered.text, [], gathered.finished))
            yield Outcome(each.name, answer, verdict)


def _request(backend: Backend, schema: CompiledSchema, most_tokens: int, source: random.Random) -> Request:
    """Return a request that prefers closing tokens, because objects would otherwise grow without end."""
    tokens = backend.tokenizer.all_token_bytes()
    bias = {b'"': source.choice([4.0, 5.0]), **dict.fromkeys(_CLOSING, source.choice([0.0, 2.0, 4.0]))}
    sampling = SamplingParams(
        temperature=source.choice([0.7, 1.0]),
        seed=source.randrange(1 << 30),
        logit_bias={token: bias[text] for token, text in enumerate(tokens) if text in bias},
    )
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema.schema))
    return Request(TokenPrompt(_PROMPT), most_tokens, sampling=sampling, response_format=wanted)


def _answer(gathered: Gathered) -> RandomAnswer:
    if isinstance(gathered.last, Failed):
        return RandomAnswer(gathered.text.encode(), ended=False, error=str(gathered.last.error))
    return RandomAnswer(gathered.text.encode(), ended=gathered.finished.reason is FinishReason.STOP)


def _assert_refused(done: AnsweredRequest) -> None:
    try:
        check_format(done)
    except InvalidAnswer:
        return
    raise AssertionError(f"an answer that was cut off was not refused: {done.text}")
