"""The state of one request: its tokens so far, its decoder and its timestamps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.engine.requests import ChatPrompt, Event, Failed, Finished, Request, TextDelta, TokenLogprobs
from llmrun.engine.sampling import log_probabilities, sample
from llmrun.engine.stats import request_timings
from llmrun.engine.thinking.splitter import Split
from llmrun.errors import LlmrunError
from llmrun.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.engine.thinking.decoder import ThinkingDecoder
    from llmrun.tokenizers.base import Tokenizer


@dataclass(slots=True, eq=False)
class Answer:
    """A request's state, from `submit` to its last event. Times are in seconds of `time.perf_counter`.

    tokens           the prompt's tokens, followed by the generated ones
    decoder          turns the generated tokens into text
    ending           the tokens to force when the thinking budget is used up
    limit            the maximum number of prompt and generated tokens: the context size, or less if `max_tokens` is set
    cached_tokens    prompt tokens reused from the KV cache; None until the request first gets a slot
    prefill_started  start of the request's first forward pass
    last_cancel      the engine's cancel counter when the request was submitted
    thinking_tokens  how many of the generated tokens belong to thinking
    first_answer     time at which the first text after the thinking arrived
    over             True once the last event has been returned
    """

    request_id: int
    request: Request
    tokenizer: Tokenizer
    tokens: list[int]
    decoder: ThinkingDecoder
    ending: Sequence[int]
    limit: int
    load_s: float
    submitted: float
    last_cancel: int
    prompt_tokens: int = field(init=False)
    cached_tokens: int | None = None
    prefill_started: float | None = None
    token_times: list[float] = field(default_factory=list)
    thinking_tokens: int = 0
    first_answer: float | None = None
    over: bool = False
    _forced: deque[int] = field(default_factory=deque)  # tokens to emit next without sampling

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def in_prefill(self) -> bool:
        """True until the first token has been generated."""
        return not self.token_times

    def accept(self, logits: NDArray[np.float32]) -> list[Event]:
        """Draw the next token from the logits (float32[vocabulary]) and return the resulting events."""
        forced = bool(self._forced)
        try:
            token = self._forced.popleft() if forced else self._drawn(logits)
        except LlmrunError as error:
            return [self.fail(error)]
        self.tokens.append(token)
        self.token_times.append(time.perf_counter())
        if token in self.tokenizer.end_of_generation and not forced and not self.decoder.continues_after(token):
            return self.finish(FinishReason.STOP)
        self.thinking_tokens += self.decoder.thinking
        split = self.decoder.feed(token, self._bytes_of(token))
        self._note_first_answer(split)
        self._enforce_think_budget()
        delta = self._delta(split, (token,), self._logprobs(logits, token))
        if self.decoder.stopped_by is not None:
            return [delta, *self.finish(FinishReason.STOP)]
        if len(self.tokens) >= self.limit:
            return [delta, *self.finish(FinishReason.LENGTH)]
        return [delta]

    def _drawn(self, logits: NDArray[np.float32]) -> int:
        return sample(logits, self.tokens, self.request.sampling, position=len(self.tokens))

    def _note_first_answer(self, split: Split) -> None:
        if split.unopened:
            self.first_answer = None
            self.thinking_tokens = len(self.token_times)
        if self.first_answer is None and self.decoder.answering:
            self.first_answer = self.token_times[-1]

    def _enforce_think_budget(self) -> None:
        """Force the end of thinking once the thinking budget is used up.

        A closing tag that the model may already be writing is not interrupted. Thinking is ended only once per answer,
        and any later thinking counts as part of the answer. Otherwise, a model that starts to think again and again
        would fill the context with closing tags.
        """
        budget = self.request.think_budget
        if budget is None or self.thinking_tokens < budget or self._forced:
            return
        if self.decoder.thinking and not self.decoder.may_be_closing:
            self._forced.extend(self.ending)
            self.decoder.disallow_thinking()

    def finish(self, reason: FinishReason) -> list[Event]:
        """End the answer. Returns the buffered text, if any, followed by the last event."""
        self.over = True
        held = Split() if self.decoder.stopped_by else self.decoder.finish()
        if self.decoder.stopped_by and reason is not FinishReason.CANCELLED:
            reason = FinishReason.STOP
        now = time.perf_counter()
        timings = request_timings(
            load_s=self.load_s,
            submitted=self.submitted,
            prefill_started=now if self.prefill_started is None else self.prefill_started,
            token_times=self.token_times,
            ended=now,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
        )
        finished = Finished(
            self.request_id,
            reason,
            self.decoder.stopped_by,
            len(self.tokens),
            timings,
            self.thinking_tokens,
            0.0 if self.first_answer is None else self.first_answer - self.submitted,
        )
        return [self._delta(held, ()), finished] if held != Split() else [finished]

    def _delta(self, split: Split, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> TextDelta:
        tentative = self.decoder.tentative and not self.over
        return TextDelta(self.request_id, split.answer, tokens, logprobs, split.thought, split.unopened, tentative)

    def fail(self, error: LlmrunError) -> Failed:
        """End the answer with an error."""
        self.over = True
        return Failed(self.request_id, error)

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a generated token.

        Some tokenizers add a space at the start of every text. That space is removed from the first token of a new
        message, but kept if the answer continues an existing text.
        """
        prompt = self.request.prompt
        begins = len(self.token_times) == 1 and isinstance(prompt, ChatPrompt) and prompt.add_generation_prompt
        return self.tokenizer.decode([token]) if begins else self.tokenizer.token_bytes(token)

    def _logprobs(self, logits: NDArray[np.float32], token: int) -> tuple[TokenLogprobs, ...]:
        if self.request.logprobs is None:
            return ()
        chosen, top = log_probabilities(logits, token, self.request.logprobs)
        described = [TokenLogprob(i, self.tokenizer.token_bytes(i), value) for i, value in [(token, chosen), *top]]
        return (TokenLogprobs(described[0], tuple(described[1:])),)
