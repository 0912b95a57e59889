"""The engine: schedules requests on a backend and turns them into events."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.answer import Answer
from llmrun.engine.requests import (
    Event,
    Failed,
    PrefillProgress,
    Request,
    TextPrompt,
    TokenPrompt,
    ban_tokens,
    check_request,
)
from llmrun.engine.slots import SequenceSlots, Slot
from llmrun.engine.templates.chat_template import ChatTemplate, choose_template
from llmrun.engine.templates.process import TemplateProcess
from llmrun.engine.thinking.decoder import ThinkingDecoder
from llmrun.engine.thinking.prompting import ModelThinking
from llmrun.errors import Cancelled, ContextExceeded, KVFull, ModelFileError, TemplateRefused, UsageError
from llmrun.types import Batch, FinishReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.tokenizers.base import Tokenizer
    from llmrun.types import ModelInfo

# The maximum number of prompt tokens in one step. It is large enough to keep the kernels busy, and small enough that
# other requests, Ctrl-C and the progress bar wait at most a second on a slow machine.
ROWS_PER_STEP = 256

Work = list[tuple[Answer, Slot, list[int]]]  # each answer with its slot and the tokens to run in this step


class Engine:
    """One open model that runs up to `info.max_sequences` requests at a time.

    Either pass requests to `submit` and call `step` until `idle`, or use `generate` for a single request.
    Only `cancel` and `cancel_current` are thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        thinking_tags: Sequence[str] | None = None,
        templates: TemplateProcess | None = None,
        load_s: float = 0.0,
        rows_per_step: int = ROWS_PER_STEP,
    ) -> None:
        """Create an engine that owns an open backend and `templates`; `close` closes both.

        chat_template  Jinja source that replaces the model's own template
        thinking_tags  the opening and closing thinking tags, used if the template does not reveal them; () if the
                       model never thinks
        templates      the process that runs the chat template; by default, a process starts on first use
        load_s         time to open the backend, in seconds; included in the timings
        rows_per_step  the maximum number of prompt tokens in one step; it does not affect the answers
        """
        self._backend = backend
        self._slots = SequenceSlots(backend.kv, backend.info.max_sequences)
        self._rows_per_step = rows_per_step
        self._waiting: deque[Answer] = deque()
        self._running: dict[Answer, Slot] = {}  # in order of admission
        self._admission_paused = (
            False  # set when the cache fills up while several requests run; cleared when one of them has ended
        )
        self._ids = itertools.count()
        # Other threads and signal handlers may write these at any time, which is why each write is atomic.
        self._cancel_numbers = itertools.count(1)
        self._last_cancel = 0  # increases with each `cancel_current`, which cancels all requests submitted before it
        self._cancel_wishes: deque[int] = deque()  # ids of requests to cancel
        self.load_s = load_s
        self.template: ChatTemplate | None = choose_template(backend.info, backend.tokenizer, chat_template)
        self._templates = templates or TemplateProcess()
        self.thinking = ModelThinking(self.template, backend.tokenizer, self._templates, thinking_tags)

    @classmethod
    def open(
        cls,
        path: Path,
        options: OpenOptions,
        *,
        chat_template: str | None = None,
        thinking_tags: Sequence[str] | None = None,
        templates: TemplateProcess | None = None,
    ) -> Engine:
        """Open a GGUF file on the backend that `options` selects, or on the best one.

        `chat_template` is Jinja source, not a path. `__init__` describes the other parameters. Raises ModelFileError,
        UnsupportedModel, DoesNotFit, BackendCrashed or UsageError.
        """
        from llmrun.backends.select import open_backend

        started = time.perf_counter()
        opened = open_backend(path, options)
        try:
            loaded = time.perf_counter() - started
            return cls(
                opened, chat_template=chat_template, thinking_tags=thinking_tags, templates=templates, load_s=loaded
            )
        except BaseException:
            opened.close()  # otherwise, its threads or its process would keep running
            raise

    @property
    def info(self) -> ModelInfo:
        """The model's name, sizes and metadata."""
        return self._backend.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._backend.tokenizer

    @property
    def takes_chats(self) -> bool:
        """True if the model has a chat template, so that it accepts a ChatPrompt."""
        return self.template is not None

    @property
    def idle(self) -> bool:
        """True if no request is waiting or running."""
        return not self._waiting and not self._running

    def prompt_tokens(self, request: Request) -> int:
        """Count the tokens of a request's prompt without running it. Raises the same errors as `submit`."""
        return len(self._begin(request)[0])

    def submit(self, request: Request) -> int:
        """Queue a request and return the id that its events will have. `Timings` are measured from this call.

        Raises ContextExceeded if the prompt does not fit, TemplateRefused if the chat template fails or is missing,
        UsageError for an invalid parameter, and ModelFileError if the vocabulary has no token for the prompt's text.
        """
        last_cancel = self._last_cancel
        submitted = time.perf_counter()
        check_request(request, self.info.vocabulary_size)
        request = ban_tokens(request, self.info.suppressed_tokens)
        tokens, decoder = self._begin(request)
        ending = self._closing_tokens() if request.think_budget is not None else ()
        limit = self._token_limit(len(tokens), request.max_tokens)
        request_id = next(self._ids)
        answer = Answer(
            request_id, request, self.tokenizer, tokens, decoder, ending, limit, self.load_s, submitted, last_cancel
        )
        self._waiting.append(answer)
        return request_id

    def step(self) -> list[Event]:
        """Run one forward pass for all running requests and return the resulting events.

        Every answer in progress gets its next token. The remaining rows are used for prompts in order of admission. If
        the backend raises an error other than KVFull or Cancelled, the requests in that pass are dropped.
        """
        events = self._end_cancelled()
        self._admit()
        work = self._pick_rows()
        if not work:
            return events
        try:
            logits = iter(self._forward(work))
        except Cancelled:
            return events + self._end_cancelled()
        except KVFull:
            return events + self._make_room()
        except BaseException:
            self._forget(work)
            raise
        for answer, slot, tokens in work:
            slot.tokens += tokens
            if answer.in_prefill:
                events.append(PrefillProgress(answer.request_id, len(slot.tokens), answer.prompt_tokens))
            if len(slot.tokens) == len(answer.tokens):
                events += answer.accept(next(logits))
        self._retire()
        return events

    def generate(self, request: Request) -> Iterator[Event]:
        """Submit one request and yield its events. The last one is Finished.

        The request is submitted when the first event is requested. Closing the iterator early drops the request.
        Raises the errors of `submit`, the error of a Failed event, and UsageError while other requests are unfinished.
        """
        if not self.idle:
            raise UsageError("cannot generate while other requests are unfinished: use submit and step instead")
        self.submit(request)
        try:
            while not self.idle:
                for event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            self._drop_all()

    def cancel(self, request_id: int) -> None:
        """Cancel a request. It ends with Finished(CANCELLED) at the next `step`. Unknown or ended ids are ignored."""
        self._cancel_wishes.append(request_id)

    def cancel_current(self) -> None:
        """Cancel all waiting and running requests immediately.

        Signal handlers and other threads may call this. It also cancels a request that `submit` is still tokenizing.
        """
        self._last_cancel = next(self._cancel_numbers)
        self._backend.cancel()

    def forget(self) -> None:
        """Empty the KV cache of all idle sequences, so that the next requests cannot reuse a prefix."""
        while self._slots.forget_oldest_idle():
            pass

    def close(self) -> None:
        """Drop all requests and close the backend. Idempotent."""
        self._drop_all()
        self._templates.close()
        self._backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, request: Request) -> tuple[list[int], ThinkingDecoder]:
        """Return the tokens of a request's prompt and the decoder for its answer."""
        prompt = request.prompt
        if isinstance(prompt, TokenPrompt):
            return list(prompt.tokens), ThinkingDecoder(request.stop)
        if isinstance(prompt, TextPrompt):
            return self._tokens_of_text(prompt.text), ThinkingDecoder(request.stop)
        if self.template is None:
            raise TemplateRefused(
                f"no chat template: {self.info.path}: the file has none, and its vocabulary matches no known model "
                "family",
                hint="send the prompt without a template (--raw), or pass a template with --chat-template FILE",
            )
        think = False if request.think_budget == 0 else request.think
        rendered = self.template.render(self.thinking.asked(prompt, think), self.tokenizer, self._templates)
        if not prompt.add_generation_prompt:
            return self.tokenizer.encode_rendered(rendered).tolist(), ThinkingDecoder(request.stop)
        beginning = self.thinking.begun(rendered, think)
        decoder = ThinkingDecoder(
            request.stop, self.thinking.spelling, opened=beginning.opened, may_close=beginning.may_close
        )
        return self.tokenizer.encode_rendered(beginning.text).tolist(), decoder

    def _tokens_of_text(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special=True, parse_special=True).tolist()
        if text and not tokens:
            raise ModelFileError(
                f"prompt cannot be tokenized: {self.info.path}: the vocabulary contains none of its "
                f"{len(text):,} characters"
            )
        return tokens

    def _closing_tokens(self) -> list[int]:
        if self.thinking.style is None:
            return []
        ids: list[int] = self.tokenizer.encode(
            self.thinking.style.ending, add_special=False, parse_special=True
        ).tolist()
        return ids

    def _token_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the maximum combined number of prompt and answer tokens. Raises ContextExceeded or UsageError."""
        context = min(self.info.context_size, self._backend.kv.capacity)
        if prompt_tokens == 0:
            raise UsageError("empty prompt: at least one token is needed")
        if prompt_tokens >= context:
            trained = self.info.train_context
            raise ContextExceeded(
                f"prompt does not fit in the context: {prompt_tokens:,} tokens plus one for the "
                f"answer exceed the limit of {context:,}",
                hint=f"shorten the prompt, or raise --ctx-size (the model was trained for {trained:,})"
                if context < trained
                else "shorten the prompt: the model was not trained for a longer context",
            )
        return context if max_tokens is None else min(context, prompt_tokens + max_tokens)

    def _admit(self) -> None:
        """Give slots to waiting requests, first come, first served."""
        while self._waiting and not self._admission_paused:
            slot = self._slots.acquire(self._waiting[0].tokens)
            if slot is None:
                return
            answer = self._waiting.popleft()
            if answer.cached_tokens is None:
                answer.cached_tokens = len(slot.tokens)
            self._running[answer] = slot

    def _pick_rows(self) -> Work:
        """Choose the next tokens of each running request: one token of an answer, or a chunk of a prompt."""
        work: Work = []
        prompts: Work = []
        for answer, slot in self._running.items():
            missing = answer.tokens[len(slot.tokens) :]
            (work if len(missing) == 1 else prompts).append((answer, slot, missing))
        room = max(self._rows_per_step - len(work), 1)
        for answer, slot, missing in prompts:
            if room > 0:
                work.append((answer, slot, missing[:room]))
                room -= len(missing[:room])
        for answer, _, _ in work:
            answer.prefill_started = answer.prefill_started or time.perf_counter()
        return work

    def _forward(self, work: Work) -> NDArray[np.float32]:
        try:
            return self._backend.forward(_batch(work))
        except Cancelled:
            self._slots.recount([slot for _, slot, _ in work])
            raise

    def _make_room(self) -> list[Event]:
        """Free space in a full KV cache.

        If there is an idle slot with a cached prefix, that prefix is dropped. Otherwise, the newest request returns to
        the queue or, if only one request is running, that request ends. After a request has returned to the queue, no
        request is admitted until a running one has ended, because two requests could otherwise evict each other
        forever.
        """
        if self._slots.forget_oldest_idle():
            return []
        answer, slot = next(reversed(self._running.items()))
        if len(self._running) > 1:
            del self._running[answer]
            self._slots.forget(slot)
            self._waiting.appendleft(answer)
            self._admission_paused = True
            return []
        if answer.in_prefill:
            error = ContextExceeded(
                f"prompt does not fit in the KV cache: {answer.prompt_tokens:,} tokens, but the "
                f"cache is full after {len(slot.tokens):,}",
                hint="shorten the prompt",
            )
            events: list[Event] = [answer.fail(error)]
        else:
            events = answer.finish(FinishReason.LENGTH)
        self._retire()
        return events

    def _end_cancelled(self) -> list[Event]:
        events: list[Event] = []
        named = {self._cancel_wishes.popleft() for _ in range(len(self._cancel_wishes))}
        for answer in [*self._waiting, *self._running]:
            if answer.request_id in named or answer.last_cancel != self._last_cancel:
                events += answer.finish(FinishReason.CANCELLED)
        self._retire()
        return events

    def _retire(self) -> None:
        """Remove finished requests. The tokens in their slots stay cached for later requests."""
        for answer in [answer for answer in self._running if answer.over]:
            self._slots.release(self._running.pop(answer))
            self._admission_paused = False
        if any(answer.over for answer in self._waiting):
            self._waiting = deque(answer for answer in self._waiting if not answer.over)

    def _drop_all(self) -> None:
        self._waiting.clear()
        while self._running:
            self._slots.release(self._running.popitem()[1])
        self._admission_paused = False

    def _forget(self, work: Work) -> None:
        """Drop the requests of a failed pass and empty their slots, whose state in the cache is unknown."""
        for answer, _, _ in work:
            del self._running[answer]
        self._admission_paused = False
        for _, slot, _ in work:
            self._slots.forget(slot)


def _batch(work: Work) -> Batch:
    """Build the batch of one pass. It requests logits only for each request's last token."""
    tokens: list[int] = []
    seq: list[int] = []
    pos: list[int] = []
    want: list[bool] = []
    for answer, slot, missing in work:
        held = len(slot.tokens)
        tokens += missing
        seq += [slot.index] * len(missing)
        pos += range(held, held + len(missing))
        want += [False] * (len(missing) - 1) + [held + len(missing) == len(answer.tokens)]
    return Batch(np.array(tokens, np.int32), np.array(seq, np.int32), np.array(pos, np.int32), np.array(want))
