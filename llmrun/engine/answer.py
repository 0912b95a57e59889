"""The state of one request, including its tokens so far, its decoder and its timestamps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct, structs

from llmrun.base.errors import LlmrunError
from llmrun.base.types import IMAGE_ROW, FinishReason, TokenLogprob
from llmrun.engine.adapters import unless_of_adapters
from llmrun.engine.base import request_timings
from llmrun.engine.requests import (
    ChatPrompt,
    Event,
    Failed,
    Finished,
    PromptDelta,
    Request,
    TextDelta,
    TextPrompt,
    TokenLogprobs,
    without_files,
)
from llmrun.engine.sampler import Drawn, Sampler, SequenceRows
from llmrun.engine.samplers import SamplerState, initial_state
from llmrun.engine.sampling import bad_output
from llmrun.engine.thinking import Split
from llmrun.model.tokenizers.text_tokenizer import decode_spelled, spelled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.adapters import AdaptedTokens
    from llmrun.engine.constraint.answer import AnswerConstraint
    from llmrun.engine.drafting.base import Drafter
    from llmrun.engine.drafting.pace import AnswerPace
    from llmrun.engine.image_rows import PromptImages
    from llmrun.engine.saved_state.budget import SavedPrefixes
    from llmrun.engine.thinking import ThinkingDecoder
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

_LONGEST_ENDING: Final = 64  # forced tokens; steps do not check longer sequences for the end of the answer
_PIECE: Final = 64  # tokens of a prompt whose log-probabilities are in the same PromptDelta


class PrefixWait(Struct, frozen=True):
    """The prefix that a request waits for: the first `n` tokens of `leader`, a running request."""

    leader: Answer
    n: int


class ExpectedPrefix(Struct, frozen=True):
    """The prefix with which a request will probably start: its first `n` tokens.

    load_s  seconds to load the prefix, if it is saved in a file
    leader  the id of the request that will compute the prefix, or None
    """

    n: int
    load_s: float = 0.0
    leader: int | None = None


@dataclass(slots=True, eq=False)
class Answer:
    """A request's state, from `submit` to its last event. Times are in seconds of `time.perf_counter`.

    tokens           the prompt's tokens, followed by the generated ones
    decoder          turns the generated tokens into text
    ending           the tokens to force when the thinking budget is used up
    limit            the maximum number of prompt and generated tokens: the context size, or less if `max_tokens` is set
    cached_tokens    prompt tokens reused from the KV cache; None until the request first gets a slot
    found_tokens     prompt tokens that were found in the KV cache; the cache may have kept fewer of them
    computed_tokens  tokens that were in the KV cache when the request ended; None until then
    prefill_started  start of the request's first forward pass
    last_cancel      the engine's cancel counter when the request was submitted
    sampler          draws tokens
    constraint       the tokens that the request's response format allows, or None
    cut_tokens       the number of tokens that were left out of the prompt
    adapters         the LoRA adapters, or None if no token uses any
    images           the images of the prompt, or None
    encoded_images   how many images were encoded for the request
    encode_s         seconds for encoding them
    image_wait_s     seconds in which the request had no rows in steps, because its next image was not encoded yet, or
                     because one of its images was being encoded in the engine's thread
    drafters         predict the answer's next tokens (drafting/)
    pace             decides how long the drafts are
    prefix_scope     requests with the same scope share cached prefixes
    saved            the files with saved prefixes that the request loads and saves, or None
    paused_at        the number of tokens for which the last step had no room in the KV cache, or None if it had room
    last_step        the number of the last step in which the request had rows, as counted by its scheduler
    runs_alone       True until the request has been part of a step, if that step must have no other requests
    expected         the prefix with which a request in the queue will probably start, or None if it was not predicted
    wait             the prefix that a queued request waits for, as of its last check, or None (scheduling/scheduler.py)
    has_waited       True if the request has waited for a prefix
    thinking_tokens  how many of the generated tokens belong to thinking
    first_answer     time at which the first text after the thinking arrived
    step_times       when each step that generated tokens ended; a step can generate several tokens
    forced           tokens to add next without sampling
    sampler_state    the state of the samplers before the next token; only drawn tokens that are accepted change it
    drafted_tokens   tokens that drafters predicted and a step verified
    accepted_tokens  how many of the drafted tokens were right
    forced_tokens    forced tokens without a step of their own: another token's step ran them, or they end the answer
    drawn_in_a_row   tokens since the last forced one, or since the prompt
    described        how many of the prompt's first tokens have log-probabilities already, or need none
    over             True once the last event has been returned
    ended_by         why the answer ended; None for a request that has failed or is not over
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
    sampler: Sampler
    drafters: Sequence[Drafter]
    pace: AnswerPace
    constraint: AnswerConstraint | None = None
    cut_tokens: int = 0
    adapters: AdaptedTokens | None = None
    images: PromptImages | None = None
    encoded_images: int = 0
    encode_s: float = 0.0
    image_wait_s: float = 0.0
    prompt_tokens: int = field(init=False)
    cached_tokens: int | None = None
    found_tokens: int = 0
    computed_tokens: int | None = None
    prefill_started: float | None = None
    prefix_scope: str = ""
    saved: SavedPrefixes | None = None
    paused_at: int | None = None
    last_step: int = 0
    runs_alone: bool = False
    expected: ExpectedPrefix | None = None
    wait: PrefixWait | None = None
    has_waited: bool = False
    step_times: list[float] = field(default_factory=list)
    thinking_tokens: int = 0
    first_answer: float | None = None
    forced: deque[int] = field(default_factory=deque)
    sampler_state: SamplerState = field(init=False)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    drawn_in_a_row: int = 0
    described: int = field(init=False)
    over: bool = False
    ended_by: FinishReason | None = None
    _unsent: list[TokenLogprobs] = field(default_factory=list, init=False)  # the beginning of the prompt's next piece
    _echoed: bool = False  # True after the first PromptDelta
    _marked: list[int] = field(default_factory=list, init=False)  # the first tokens, as in `cached_as`
    _words: list[int] = field(default_factory=list, init=False)  # the words among the first tokens
    _n_read: int = field(default=0, init=False)  # the number of these tokens
    _failed: LlmrunError | None = field(default=None, init=False)  # an error of the constraint, raised by the next draw

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.described = 0 if self.describes_prompt else self.prompt_tokens
        self.sampler_state = initial_state(self.request.sampling)
        if self.constraint is not None:
            try:
                self.forced.extend(self.constraint.forced_first())
            except LlmrunError as error:
                self._failed = error

    @property
    def cached_as(self) -> list[int]:
        """The numbers under which the tokens are cached.

        They differ from the tokens if adapters apply to them, and for the rows of images.
        """
        if self.adapters is None and self.images is None:
            return self.tokens
        marked = self._marked
        if len(marked) < len(self.tokens):  # several threads may do this at the same time
            self._marked = marked = [*marked, *self.cached_from(self.tokens[len(marked) :], len(marked))]
        return marked

    @property
    def reusable(self) -> list[int]:
        """The tokens, as in `cached_as`, that the request may take from a cached prefix.

        The log-probabilities of a prompt require the logits of all its rows, so none of the tokens that still need
        log-probabilities can be taken from the cache.
        """
        return self.cached_as if self.described >= self.prompt_tokens else self.cached_as[:1]

    @property
    def describes_prompt(self) -> bool:
        """True if the request asks for the log-probabilities of the prompt's tokens."""
        return self.request.echo and self.request.logprobs is not None

    @property
    def most_rows(self) -> int:
        """The maximum number of tokens in the cache. The last token of an answer is never run."""
        return max(self.limit - 1, self.prompt_tokens)

    def cached_from(self, tokens: Sequence[int], first: int) -> Sequence[int]:
        """Return the numbers under which tokens from position `first` on are cached."""
        numbers = tokens if self.images is None else self.images.marked(tokens, first)
        return numbers if self.adapters is None else self.adapters.marked(numbers, first)

    def lacks_image(self, position: int) -> bool:
        """Return whether the token at a position is a row of an image that is not encoded yet."""
        return self.images is not None and self.images.lacks_row(position)

    def forget_files(self) -> None:
        """Forget the files of the images, because a request may be remembered after its end (prefix_history.py)."""
        if self.images is not None:
            self.images.forget_files()
            self.request = structs.replace(self.request, prompt=without_files(self.request.prompt))

    @property
    def words(self) -> Sequence[int]:
        """The tokens of the prompt and the answer without the rows of images."""
        if self.images is None:
            return self.tokens
        self._words += [token for token in self.tokens[self._n_read :] if token != IMAGE_ROW]
        self._n_read = len(self.tokens)
        return self._words

    @property
    def tenant(self) -> str:
        """The owner of the request (scheduling/fairness.py)."""
        return self.request.tenant

    @property
    def in_prefill(self) -> bool:
        """True until the first token has been generated."""
        return not self.generated_tokens

    @property
    def generated_tokens(self) -> int:
        """The number of generated tokens, including an end-of-generation token."""
        return len(self.tokens) - self.prompt_tokens

    def rows_to_draw(self, logits: NDArray[np.float32], draft: Sequence[int]) -> SequenceRows:
        """Return the rows of logits, float32[1 + len(draft), vocabulary], from which to draw tokens.

        There are no rows if the answer is over or at its limit, if the next token is forced, or if `logits` is empty,
        as inside a prompt.
        """
        rows = logits[:0] if self.forced or self.over or len(self.tokens) >= self.limit else logits
        masks = None
        if self.constraint is not None and len(rows):
            try:
                masks = self.constraint.masks(draft)
            except LlmrunError as error:
                self._failed = error
                rows = logits[:0]
        params, position = self.request.sampling, len(self.tokens)
        return SequenceRows(
            logits=rows,
            history=self.words,
            params=params,
            position=position,
            draft=draft,
            masks=masks,
            state=self.sampler_state,
            tokenizer=self.tokenizer,
        )

    def n_allowed(self, draft: Sequence[int]) -> int:
        """Return the number of leading tokens of a draft that the response format allows."""
        if self.constraint is None:
            return len(draft)
        try:
            return self.constraint.n_allowed(draft)
        except LlmrunError as error:
            self._failed = error
            return 0

    def echo(self, logits: NDArray[np.float32]) -> list[Event]:
        """Return the next pieces of the prompt, if the request asks for them, or Failed if a row is not finite.

        logits  float32[rows, vocabulary], the rows of the step that predict the next tokens of the prompt whose
                log-probabilities are missing; `rows_to_describe` returns their number
        """
        if not self.describes_prompt:
            return [] if self._echoed or not self.request.echo else [self._prompt_delta(())]
        if not self.described:
            first = TokenLogprob(self.tokens[0], spelled(self.tokenizer, self.tokens[0]), 0.0)
            self._unsent.append(TokenLogprobs(first, ()))
            self.described = 1
        for row in logits:
            self._unsent += self._logprobs(row, self.tokens[self.described])
            self.described += 1
            if math.isnan(self._unsent[-1].chosen.logprob):
                return [self.fail(unless_of_adapters(bad_output(float(row.max())), self.request.adapters))]
        n = len(self._unsent)
        if self.described < self.prompt_tokens:
            n -= n % _PIECE
        complete, self._unsent = self._unsent[:n], self._unsent[n:]
        return [self._prompt_delta(complete[at : at + _PIECE]) for at in range(0, n, _PIECE)]

    def _prompt_delta(self, logprobs: Sequence[TokenLogprobs]) -> PromptDelta:
        prompt, text = self.request.prompt, ""
        if not self._echoed and isinstance(prompt, TextPrompt):
            text = prompt.text
        elif not self._echoed:
            prompt_words = self.words[: len(self.words) - self.generated_tokens]
            text = decode_spelled(self.tokenizer, prompt_words).decode("utf-8", "replace")
        self._echoed = True
        return PromptDelta(self.request_id, text, tuple(logprobs))

    def rows_to_describe(self, start: int, end: int) -> int:
        """Return how many rows of a step predict tokens of the prompt whose log-probabilities are missing.

        The step has rows for the positions from `start` to `end`. The counted rows are the last ones, not including the
        row of the prompt's last token.
        """
        return max(0, min(end, self.prompt_tokens - 1) - max(start, self.described - 1))

    def add_certain(self, logits: NDArray[np.float32], certain: Sequence[int]) -> list[Event]:
        """Add the forced tokens that a step has run, before `accept`, and return the resulting events.

        logits  float32[len(certain), vocabulary], from which these tokens follow, if the request asks for
                log-probabilities; otherwise no rows
        """
        self.step_times.append(time.perf_counter())
        events: list[Event] = []
        for index in range(len(certain)):
            if self.over:
                break
            events += self._add_forced(logits[index] if len(logits) else None)
        return events

    def accept(self, logits: NDArray[np.float32], draft: Sequence[int], drawn: Drawn) -> list[Event]:
        """Add the remaining new tokens of the step to the answer, and return the resulting events.

        Row 0 of `logits`, a float32[1 + len(draft), vocabulary], yields the next token. The row of a draft token is
        valid only if all tokens up to it equal the draft, so no tokens are taken after the first difference. `drawn`
        contains the tokens drawn from the result of `rows_to_draw`.
        """
        events: list[Event] = []
        if self.over:
            return events
        if len(self.tokens) >= self.limit:  # the request asks only for its prompt
            return self.finish(FinishReason.LENGTH)
        self.drafted_tokens += len(draft)
        for index, (row, drafted) in enumerate(zip(logits, [*draft, None], strict=True)):
            events += self._accept_row(row, drafted, index, drawn)
            if self.over or self.tokens[-1] != drafted:
                break
        return events + self._add_last()

    def _add_last(self) -> list[Event]:
        """Add the forced tokens without a step if these tokens end the answer, and return the resulting events."""
        if self.over or self.constraint is None or self.request.logprobs is not None:
            return []
        if not 0 < len(self.forced) <= _LONGEST_ENDING:
            return []
        try:
            if not self.constraint.is_completed_by(self.forced):
                return []
        except LlmrunError as error:
            return [self.fail(error)]
        events: list[Event] = []
        while self.forced and not self.over:
            events += self._add_forced(None)
        return events

    def _add_forced(self, logits: NDArray[np.float32] | None) -> list[Event]:
        """Add the next forced token without a step of its own, and return the resulting events."""
        self.forced_tokens += 1
        return self._add(self.forced.popleft(), logits, forced=True)

    def _accept_row(self, logits: NDArray[np.float32], drafted: int | None, index: int, drawn: Drawn) -> list[Event]:
        """Add the token of the row with this index, compare it with the draft, and return the events."""
        forced = bool(self.forced)
        try:
            token = self.forced.popleft() if forced else self._drawn(logits, index, drawn)
        except LlmrunError as error:
            return [self.fail(error)]
        self.accepted_tokens += token == drafted
        return self._add(token, logits, forced=forced)

    def _add(self, token: int, logits: NDArray[np.float32] | None, *, forced: bool) -> list[Event]:
        """Add a token and return the resulting events. The logits are needed only for log-probabilities."""
        self.tokens.append(token)
        self.drawn_in_a_row = 0 if forced else self.drawn_in_a_row + 1
        if token in self.tokenizer.end_of_generation and not forced and not self.decoder.continues_after(token):
            # Evaluators count the entries of an answer from its end, so each generated token needs an entry.
            described = self._logprobs(logits, token) if self.describes_prompt else ()
            named = [self._delta(Split(), (token,), described)] if described else []
            return [*named, *self.finish(FinishReason.STOP)]
        self.thinking_tokens += self.decoder.thinking
        split = self.decoder.feed(token, self._bytes_of(token))
        self._note_first_answer(split)
        self._enforce_think_budget()
        try:
            self._follow_format(token)
        except LlmrunError as error:
            return [self.fail(error)]
        delta = self._delta(split, (token,), self._logprobs(logits, token))
        if self.decoder.stopped_by is not None or (self.constraint is not None and self.constraint.is_complete):
            return [delta, *self.finish(FinishReason.STOP)]
        if len(self.tokens) >= self.limit:
            return [delta, *self.finish(FinishReason.LENGTH)]
        return [delta]

    def _drawn(self, logits: NDArray[np.float32], index: int, drawn: Drawn) -> int:
        """Return the token drawn from the row with this index, or raise the error of the draw.

        This method draws the rows after forced tokens. The step drew tokens only up to the first difference from the
        draft, and forced tokens do not change the state of the samplers.
        """
        if self._failed is None and not drawn.has_row(index, self.sampler_state):
            index, (drawn,) = 0, self.sampler.sample_rows([self.rows_to_draw(logits[np.newaxis], ())])
        if self._failed is not None:
            raise self._failed
        if index == len(drawn.tokens) and drawn.error is not None:
            raise unless_of_adapters(drawn.error, self.request.adapters)
        self.sampler_state = drawn.states[index + 1] if drawn.states else self.sampler_state
        return drawn.tokens[index]

    def _follow_format(self, token: int) -> None:
        """Pass a new token to the constraint, and force the tokens that must follow this token."""
        if self.constraint is not None:
            self.forced.extend(self.constraint.take(token, len(self.forced)))

    def _note_first_answer(self, split: Split) -> None:
        if split.unopened:
            self.first_answer = None
            self.thinking_tokens = self.generated_tokens
        if self.first_answer is None and self.decoder.answering:
            self.first_answer = self.step_times[-1]

    def _enforce_think_budget(self) -> None:
        """Force the end of thinking once the thinking budget is used up.

        A closing tag that the model may already be writing is not interrupted. The budget ends thinking only once per
        answer, and any later thinking counts as part of the answer. Otherwise, a model that starts to think again and
        again would fill the context with closing tags.
        """
        budget = self.request.think_budget
        if budget is None or self.thinking_tokens < budget or self.forced:
            return
        if self.decoder.thinking and not self.decoder.splitter.may_be_closing:
            self.forced.extend(self.ending)
            self.decoder.splitter.disallow_thinking()

    def finish(self, reason: FinishReason) -> list[Event]:
        """End the answer. Returns the buffered text, if any, followed by the last event."""
        self.over = True
        held = self._held(reason)
        if self.decoder.stopped_by and reason is not FinishReason.CANCELLED:
            reason = FinishReason.STOP
        elif reason is FinishReason.STOP and self.decoder.has_calls:
            reason = FinishReason.TOOL_CALLS
        self.ended_by = reason
        now = time.perf_counter()
        timings = request_timings(
            load_s=self.load_s,
            submitted=self.submitted,
            prefill_started=now if self.prefill_started is None else self.prefill_started,
            step_times=self.step_times,
            ended=now,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            generated_tokens=self.generated_tokens,
            steps=len(self.step_times),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            forced_tokens=self.forced_tokens,
            encoded_images=self.encoded_images,
            encode_s=self.encode_s,
            image_wait_s=self.image_wait_s,
        )
        finished = Finished(
            request_id=self.request_id,
            reason=reason,
            stop=self.decoder.stopped_by,
            context_used=len(self.tokens),
            timings=timings,
            thinking_tokens=self.thinking_tokens,
            first_answer_s=0.0 if self.first_answer is None else self.first_answer - self.submitted,
            cut_tokens=self.cut_tokens,
        )
        return [self._delta(held, ()), finished] if held != Split() else [finished]

    def _held(self, reason: FinishReason) -> Split:
        """Return the text that the decoder still holds back when the answer ends."""
        if self.decoder.stopped_by:
            return Split()
        return self.decoder.finish() if reason is FinishReason.STOP else self.decoder.cut()

    def _delta(self, split: Split, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> TextDelta:
        tentative = self.decoder.splitter.tentative and not self.over
        shown = split.answer, tokens, logprobs, split.thought, split.unopened, tentative, split.calls
        return TextDelta(self.request_id, *shown)

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
        begins = self.generated_tokens == 1 and isinstance(prompt, ChatPrompt) and prompt.add_generation_prompt
        begins = begins and self.constraint is None  # a response format defines every space
        return self.tokenizer.decode([token]) if begins else self.tokenizer.token_bytes(token)

    def _logprobs(self, logits: NDArray[np.float32] | None, token: int) -> tuple[TokenLogprobs, ...]:
        if self.request.logprobs is None or logits is None:
            return ()
        chosen, top = self.sampler.log_probabilities(logits, token, self.request.logprobs)
        described = [TokenLogprob(i, spelled(self.tokenizer, i), value) for i, value in [(token, chosen), *top]]
        return (TokenLogprobs(described[0], tuple(described[1:])),)
