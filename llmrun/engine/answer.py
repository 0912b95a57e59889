"""One request on its way: its tokens so far, its text, its clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.engine.requests import ChatPrompt, Event, Failed, Finished, Request, TextDelta, TokenLogprobs
from llmrun.engine.sampling import log_probabilities, sample
from llmrun.engine.stats import request_timings
from llmrun.engine.streaming import StreamingDecoder
from llmrun.errors import LlmrunError
from llmrun.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.tokenizers.base import Tokenizer


@dataclass(slots=True, eq=False)
class Answer:
    """What the engine knows of a request until its last event.

    tokens           the prompt's, then those drawn
    limit            how many tokens there may be in all: the context, or less when the request wants less
    cached_tokens    of the prompt, taken over from the KV cache; None until it was first let in
    prefill_started  when its first forward pass began
    last_cancel      number of the last cancelling of everything, when this was submitted
    over             its last event is out
    """

    request_id: int
    request: Request
    tokenizer: Tokenizer
    tokens: list[int]
    limit: int
    load_s: float
    submitted: float
    last_cancel: int
    prompt_tokens: int = field(init=False)
    decoder: StreamingDecoder = field(init=False)
    cached_tokens: int | None = None
    prefill_started: float | None = None
    token_times: list[float] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.decoder = StreamingDecoder(self.request.stop)

    @property
    def in_prefill(self) -> bool:
        return not self.token_times

    def accept(self, logits: NDArray[np.float32]) -> list[Event]:
        """Draw the next token from the logits (float32[vocabulary]) and tell what it brings."""
        try:
            token = sample(logits, self.tokens, self.request.sampling, position=len(self.tokens))
        except LlmrunError as error:
            return [self.fail(error)]
        self.tokens.append(token)
        self.token_times.append(time.perf_counter())
        if token in self.tokenizer.end_of_generation:
            return self.finish(FinishReason.STOP)
        text = self.decoder.feed(self._bytes_of(token))
        delta = TextDelta(self.request_id, text, (token,), self._logprobs(logits, token))
        if self.decoder.stopped_by is not None:
            return [delta, *self.finish(FinishReason.STOP)]
        if len(self.tokens) >= self.limit:
            return [delta, *self.finish(FinishReason.LENGTH)]
        return [delta]

    def finish(self, reason: FinishReason) -> list[Event]:
        """End the answer: what text is still held, then the last event."""
        self.over = True
        held = "" if self.decoder.stopped_by else self.decoder.finish()
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
        finished = Finished(self.request_id, reason, self.decoder.stopped_by, len(self.tokens), timings)
        return [TextDelta(self.request_id, held, ()), finished] if held else [finished]

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
