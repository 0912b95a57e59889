"""One request on its way: its tokens so far, its text, its clock."""

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
    """What the engine knows of a request until its last event.

    tokens           the prompt's, then those drawn
    decoder          makes text of those drawn
    ending           the tokens that end thinking, should it have to be ended
    limit            how many tokens there may be in all: the context, or less when the request wants less
    cached_tokens    of the prompt, taken over from the KV cache; None until it was first let in
    prefill_started  when its first forward pass began
    last_cancel      number of the last cancelling of everything, when this was submitted
    thinking_tokens  of those drawn, while the model was thinking
    first_answer     when the first text of the answer proper came
    over             its last event is out
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
    _forced: deque[int] = field(default_factory=deque)  # tokens that come next, whatever the model says

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def in_prefill(self) -> bool:
        return not self.token_times

    def accept(self, logits: NDArray[np.float32]) -> list[Event]:
        """Draw the next token from the logits (float32[vocabulary]) and tell what it brings."""
        forced = bool(self._forced)
        try:
            token = self._forced.popleft() if forced else self._drawn(logits)
        except LlmrunError as error:
            return [self.fail(error)]
        self.tokens.append(token)
        self.token_times.append(time.perf_counter())
        if token in self.tokenizer.end_of_generation and not forced and not self.decoder.goes_on_after(token):
            return self.finish(FinishReason.STOP)
        self.thinking_tokens += self.decoder.thinking
        split = self.decoder.feed(token, self._bytes_of(token))
        self._mind_the_answer(split)
        self._mind_the_budget()
        delta = self._delta(split, (token,), self._logprobs(logits, token))
        if self.decoder.stopped_by is not None:
            return [delta, *self.finish(FinishReason.STOP)]
        if len(self.tokens) >= self.limit:
            return [delta, *self.finish(FinishReason.LENGTH)]
        return [delta]

    def _drawn(self, logits: NDArray[np.float32]) -> int:
        return sample(logits, self.tokens, self.request.sampling, position=len(self.tokens))

    def _mind_the_answer(self, split: Split) -> None:
        if split.unopened:
            self.first_answer = None
            self.thinking_tokens = len(self.token_times)
        if self.first_answer is None and self.decoder.answering:
            self.first_answer = self.token_times[-1]

    def _mind_the_budget(self) -> None:
        """When the model has thought as long as it may, let it write what ends its thinking. A tag that it is perhaps
        just writing itself is not cut in two. It is ended once: a model that begins anew each time would fill the
        context with that, so what it writes then is its answer."""
        budget = self.request.think_budget
        if budget is None or self.thinking_tokens < budget or self._forced:
            return
        if self.decoder.thinking and not self.decoder.may_be_closing:
            self._forced.extend(self.ending)
            self.decoder.think_no_more()

    def finish(self, reason: FinishReason) -> list[Event]:
        """End the answer: what text is still held, then the last event."""
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
        self.over = True
        return Failed(self.request_id, error)

    def _bytes_of(self, token: int) -> bytes:
        """The first token of a message starts a text of its own, so the space that some vocabularies put before
        every text is not part of it. What continues a text goes on in the middle of one."""
        prompt = self.request.prompt
        begins = len(self.token_times) == 1 and isinstance(prompt, ChatPrompt) and prompt.add_generation_prompt
        return self.tokenizer.decode([token]) if begins else self.tokenizer.token_bytes(token)

    def _logprobs(self, logits: NDArray[np.float32], token: int) -> tuple[TokenLogprobs, ...]:
        if self.request.logprobs is None:
            return ()
        chosen, top = log_probabilities(logits, token, self.request.logprobs)
        described = [TokenLogprob(i, self.tokenizer.token_bytes(i), value) for i, value in [(token, chosen), *top]]
        return (TokenLogprobs(described[0], tuple(described[1:])),)
