"""The engine: schedules requests on a backend and turns them into events."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec import structs

from llmrun.base.errors import Cancelled, KVFull, UsageError
from llmrun.base.machine.memory import return_freed_memory
from llmrun.base.types import IMAGE_ROW
from llmrun.engine.answer import Answer
from llmrun.engine.base import EngineStatus
from llmrun.engine.costs import MOST_ROWS, StepCosts
from llmrun.engine.drafting.base import NO_DRAFT, DraftSource
from llmrun.engine.prompts import ModelThinking, PromptReader
from llmrun.engine.requests import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    Request,
    StatePlace,
    ban_tokens,
    check_request,
)
from llmrun.engine.sampler import Sampler
from llmrun.engine.scheduling.admission import Admission
from llmrun.engine.scheduling.scheduler import Scheduler, Speculation, Work, batch_of, begun_by, take_results
from llmrun.engine.slots import SequenceSlots
from llmrun.engine.templates.chat_template import ChatTemplate, TemplateProcess

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.base.types import ModelInfo, Outputs, Timings
    from llmrun.engine.constraint.matcher import ConstraintCompiler
    from llmrun.engine.embedding import Embedder
    from llmrun.engine.image_encoder import ImageEncoder
    from llmrun.engine.saved_state.budget import SavedPrefixes
    from llmrun.engine.scheduling.waits import Prediction
    from llmrun.engine.tool_calls.prompting import ModelTools
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer


# Answers with more steps than this, and prompts of at least this many tokens, show the speeds that `llmrun fit` uses.
_LEAST_STEPS = 24
_LEAST_PREFILLED = MOST_ROWS
# The costs of earlier processes are looked up for predictions, and for prompts of this many tokens, whose progress is
# shown.
_LONG_PROMPT = 1024
_WAIT_S = 0.01  # how long to wait for an image if nothing else can run; meanwhile, nobody sees a new request
_BRIEF_WAIT_S = 0.001  # the same while texts are embedded between steps
_LEAST_KEPT = 4  # after this many further steps with prompts, the costs are kept for later processes


class Engine:
    """One open model that runs up to `info.max_sequences` requests at a time.

    Either pass requests to `submit` and call `step` until `idle`, or use `generate` for a single request.
    Only `prepare`, `enqueue`, `predicted`, `prefill_progress`, `cancel` and `cancel_current` are thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        thinking_tags: Sequence[str] | None = None,
        templates: TemplateProcess | None = None,
        load_s: float = 0.0,
        rows_per_step: int = MOST_ROWS,
        drafts: Sequence[DraftSource] = (),
        constraints: ConstraintCompiler | None = None,
        max_running: int | None = None,
        overcommit: bool = False,
        share_prefixes: bool = False,
        text_calls: bool = True,
        on_begin: Callable[[Sequence[int]], None] = lambda ids: None,
    ) -> None:
        """Create an engine that owns an open backend, `templates` and `drafts`; `close` closes them all.

        chat_template  Jinja source that replaces the model's own template
        thinking_tags  the opening and closing thinking tags, used if the template does not reveal them; () if the
                       model never thinks
        templates      the process that runs the chat template; by default, a process starts on first use
        load_s         time to open the backend, in seconds; included in the timings
        rows_per_step  the maximum number of prompt tokens in one step; it does not affect the answers
        drafts         draft sources, with which a step can generate several tokens; they do not affect the answers
        constraints    compiles response formats; by default, a compiler is created on first use
        max_running    the maximum number of requests that run at a time; the other sequences of the cache only keep
                       prefixes. None for one request per sequence
        overcommit     admit requests even if the cache may become full before they finish (scheduling/admission.py)
        share_prefixes let tenants share cached prefixes, which allows a tenant to discover the prompts of others
        text_calls     treat an answer that consists only of a tool call in plain JSON as a call (text_calls.py)
        on_begin       called before a step with the ids of the requests that run for the first time, and before each
                       slice of an image in this thread with the ids of the requests that need the image. After a slice,
                       it is called for the step even if no request is new
        """
        self._backend = backend
        self._sampler = Sampler(backend.info.threads)
        costs = StepCosts()
        self._speculation = Speculation(drafts, costs)
        self._scheduler = Scheduler(
            rows_per_step,
            self._speculation,
            costs,
            by_seconds=backend.info.batch_invariant,
            max_sequences=backend.info.max_sequences,
            encodes=backend.vision is not None and not backend.vision.runs_apart,
        )
        self._slots = SequenceSlots(backend.kv, backend.info.max_sequences)
        self.image_encoder: ImageEncoder | None = None
        predictors = {}
        if backend.vision is not None:
            from llmrun.engine.image_encoder import ImageEncoder

            self.image_encoder = ImageEncoder(backend.vision)
            predictors["images_s"] = self.image_encoder.expected_seconds
        self._requests = Admission(
            backend.kv,
            self._slots,
            self._speculation,
            self._scheduler,
            max_running=max_running or backend.info.max_sequences,
            overcommit=overcommit,
            **predictors,
        )
        self._share_prefixes = share_prefixes
        self._saved: SavedPrefixes | None = None
        self._embedder: Embedder | None = None
        self._on_begin = on_begin
        self._ids = itertools.count()
        # Other threads and signal handlers may write the next attributes at any time, so each write is atomic.
        self._cancel_numbers = itertools.count(1)
        self._last_cancel = 0  # increases with each `cancel_current`, which cancels all requests submitted before it
        self._cancel_wishes: deque[int] = deque()  # ids of requests to cancel
        self._in_progress: tuple[list[Work], float] | None = None  # the work and start time of the running pass
        self.load_s = load_s
        self._n_kept = 0  # the steps with prompts when the costs were last kept
        self._costs_sought = 0  # the longest prompt for which costs were looked up
        self._best_decode = self._best_prefill = 0.0  # tokens per second of one request
        self._prompts = PromptReader(
            backend,
            templates or TemplateProcess(),
            chat_template,
            thinking_tags,
            constraints,
            text_calls=text_calls,
        )
        self.speculates = bool(drafts)
        self.has_draft_head = backend.draft_head is not None

    @classmethod
    def open(
        cls,
        path: Path,
        options: OpenOptions,
        *,
        chat_template: str | None = None,
        thinking_tags: Sequence[str] | None = None,
        templates: TemplateProcess | None = None,
        speculate: bool | None = None,
        draft: Path | None = None,
        will_constrain: bool = False,
        overcommit: bool = False,
        share_prefixes: bool = False,
        on_begin: Callable[[Sequence[int]], None] = lambda ids: None,
        watch: Callable[[Backend], Backend] = lambda backend: backend,
    ) -> Engine:
        """Open a GGUF file on the backend that `options` selects, or on the best one.

        `chat_template` is Jinja source, not a path. `speculate` turns speculation by lookup on or off; None turns it on
        if the backend guarantees the same answers with it. With speculation, the model's draft head is used, too,
        unless there is a draft model. `draft` is a small model with the same vocabulary, which predicts tokens; it
        turns speculation on. `will_constrain` prepares the vocabulary for response formats while the weights are
        loaded; otherwise, the first request with a format has to wait for this preparation. `watch` may wrap the open
        backend. `__init__` describes the other parameters. Raises ModelFileError, UnsupportedModel, DoesNotFit,
        BackendCrashed or UsageError.
        """
        from llmrun.backends.registry import open_backend
        from llmrun.engine.drafting.sources import open_sources, uses_draft_head

        started = time.perf_counter()
        constraints = None
        options = replace(options, draft_head=uses_draft_head(speculate, draft))
        if will_constrain:
            from llmrun.engine.constraint.matcher import ConstraintCompiler

            constraints = ConstraintCompiler()
            options = replace(options, on_tokenizer=constraints.prepare)
        opened: Backend | None = None
        drafts: list[DraftSource] = []
        try:
            opened = open_backend(path, options)
            opened = watch(opened)
            drafts += open_sources(speculate, draft, options, opened)
            loaded = time.perf_counter() - started
            return cls(
                opened,
                chat_template=chat_template,
                thinking_tags=thinking_tags,
                templates=templates,
                load_s=loaded,
                drafts=drafts,
                constraints=constraints,
                max_running=options.max_sequences,
                overcommit=overcommit,
                share_prefixes=share_prefixes,
                text_calls=options.text_calls,
                on_begin=on_begin,
            )
        except BaseException:
            if constraints is not None:
                constraints.close()
            for source in drafts:
                source.close()
            if opened is not None:
                opened.close()  # unless closed, the backend's threads or process would keep running
            raise

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template, or None if the model has none."""
        return self._prompts.template

    @property
    def thinking(self) -> ModelThinking:
        """The model's thinking tags and switch."""
        return self._prompts.thinking

    @property
    def tools(self) -> ModelTools:
        """The model's support for tool calls."""
        return self._prompts.tools

    @property
    def info(self) -> ModelInfo:
        """The model's name, sizes and metadata."""
        return self._backend.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._backend.tokenizer

    @property
    def draft_error(self) -> str:
        """The error that stopped the draft model, or an empty string. Such errors never affect the answers."""
        return self._speculation.error

    @property
    def cache_tokens(self) -> int:
        """The number of tokens that the KV cache can hold for all running requests together."""
        return self._backend.kv.capacity

    @property
    def takes_chats(self) -> bool:
        """True if the model has a chat template, so that it accepts a ChatPrompt."""
        return self.template is not None

    @property
    def fills(self) -> bool:
        """True if the vocabulary has tokens for filling in the middle, so that the model accepts a FillPrompt."""
        return self.tokenizer.fill_tokens is not None

    @property
    def sees_images(self) -> bool:
        """True if the model was opened with its projector, so that it accepts images."""
        return self.image_encoder is not None

    @property
    def idle(self) -> bool:
        """True if no request is waiting or running."""
        return not self._requests.waiting and not self._requests.running

    def prompt_tokens(self, request: Request) -> int:
        """Count the tokens of a request's prompt without running it. Raises the same errors as `submit`."""
        return len(self._prompts.read(request).tokens)

    def render_prompt(self, request: Request) -> str:
        """Return the text of a conversation's prompt without running it. Raises the same errors as `submit`."""
        return self._prompts.render(request)

    def submit(self, request: Request) -> int:
        """Queue a request and return the id that its events will have. `Timings` are measured from this call.

        Raises ContextExceeded if the prompt does not fit, TemplateRefused if the chat template fails or is missing,
        UsageError for an invalid parameter, and ModelFileError if the vocabulary has no token for the prompt's text.
        """
        return self.enqueue(self.prepare(request))

    def prepare(self, request: Request) -> Answer:
        """Check a request and turn its prompt into tokens. Thread-safe. Raises the errors of `submit`."""
        last_cancel = self._last_cancel
        submitted = time.perf_counter()
        check_request(request, self.info.vocabulary_size)
        request = ban_tokens(request, self.info.suppressed_tokens)
        prompt = self._prompts.read(request)
        ending = self._prompts.closing_tokens() if request.think_budget is not None else ()
        most = self._prompts.token_limit(len(prompt.tokens), request.max_tokens, prompt.images)
        if prompt.images is not None and request.echo and request.logprobs is not None:
            from llmrun.engine.images import misplaced

            raise misplaced("prompts with log-probabilities")
        request_id = next(self._ids)
        image_rows = prompt.tokens.count(IMAGE_ROW) if prompt.images is not None else 0
        drafters, pace = self._speculation.begin(request, image_rows)
        answer = Answer(
            request_id=request_id,
            request=request,
            tokenizer=self.tokenizer,
            tokens=prompt.tokens,
            decoder=prompt.decoder,
            ending=ending,
            limit=most,
            load_s=self.load_s,
            submitted=submitted,
            last_cancel=last_cancel,
            sampler=self._sampler,
            drafters=drafters,
            pace=pace,
            constraint=prompt.constraint,
            cut_tokens=prompt.cut_tokens,
            adapters=prompt.adapters,
            images=prompt.images,
        )
        if not self._share_prefixes:
            answer.prefix_scope = request.tenant
        answer.saved = self._saved
        if answer.prompt_tokens >= _LONG_PROMPT:
            self._assume_costs(answer.prompt_tokens)
        return answer

    def enqueue(self, answer: Answer, *, alone: bool = False) -> int:
        """Queue a prepared request and return its id. Thread-safe.

        alone  True if the first step must have no other requests, because this request may crash the backend
        """
        answer.runs_alone = alone
        self._requests.queue(answer)
        return answer.request_id

    def predicted(self, answer: Answer) -> Prediction:
        """Predict when a prepared request starts and when its first token arrives, if queued now. Thread-safe.

        Sets `answer.expected`, too.
        """
        self._assume_costs(answer.prompt_tokens)
        running = self._in_progress
        step = None if running is None else (running[0], time.perf_counter() - running[1])
        return self._requests.predicted(answer, leaving=set(self._cancel_wishes.copy()), step=step)

    @property
    def drops(self) -> Mapping[int, float]:
        """When the last requests lost tokens in the cache, by id. Other threads may read single items."""
        return self._slots.drops

    def step(self) -> list[Event]:
        """Run one forward pass for all running requests and return the resulting events.

        Every answer in progress receives its next token, or several tokens if its draft is right, unless the answer has
        to wait for room (scheduling/scheduler.py). The remaining rows are used for prompts. If no request can run until
        an image is encoded, the step only waits for the image for a moment. If the backend raises an error other than
        KVFull or Cancelled, the requests in that pass are dropped.
        """
        last_cancel = self._last_cancel
        events = self._end_cancelled()
        requests = self._requests
        requests.admit()
        events += self._advance_images(last_cancel)
        encoder = self.image_encoder
        waiting = [] if encoder is None else encoder.waiting
        sliced_s = 0.0 if encoder is None else encoder.sliced_s
        work = self._scheduler.pick(requests.running, list(requests.waiting), requests.room(), sliced_s)
        if (begun := begun_by(work, waiting)) or (work and sliced_s):
            self._on_begin(begun)
        if not work and waiting:
            wait_s = _BRIEF_WAIT_S if self._embeds else _WAIT_S
            return events if sliced_s else events + self._advance_images(last_cancel, wait_s)
        if not work:
            return events + (requests.make_room() if requests.running else [])
        is_disturbed = encoder is not None and encoder.is_working
        started = time.perf_counter()
        try:
            work, outputs = self._forward(work)
        except Cancelled:
            events += self._end_cancelled()
            return events + self._advance_images(last_cancel)  # there may be no further step, which stops the encoding
        except KVFull:
            return events + requests.make_room()
        except BaseException:
            requests.drop_failed(work)
            raise
        try:
            self._speculation.observe_hidden(work, outputs.hidden)
            for part, new_events, drawn in take_results(self._sampler, work, outputs.logits):
                events += new_events
                for event in new_events:
                    if isinstance(event, Finished):
                        self._observe_speed(event.timings)
                requests.charge(part.answer, len(drawn))
                if part.is_last:
                    self._speculation.observe_draft(part, drawn)
                    self._cut_back(part)
        except BaseException:  # a bug, or Ctrl-C: some slots have been updated, and others have not
            requests.drop_failed(work)
            raise
        self._scheduler.observe(work, time.perf_counter() - started, is_disturbed=is_disturbed)
        requests.retire()
        return events

    def _begin_encoding(self, answers: Sequence[Answer]) -> None:
        """Report the requests of an image before each slice of its encoding, even if they began earlier.

        If the encoder crashes the process, other requests are not to blame.
        """
        begun_by((), answers)
        self._on_begin([answer.request_id for answer in answers])

    @property
    def _embeds(self) -> bool:
        """True if texts are being embedded between steps."""
        return self._embedder is not None and not self._embedder.idle

    def _advance_images(self, last_cancel: int, wait_s: float = 0.0) -> list[Event]:
        """Advance the encoding of images, whose errors end only the requests that need the image.

        last_cancel  the cancel counter at the beginning of the step
        wait_s       how long to wait for images if nothing else can run
        """
        if self.image_encoder is None:
            return []
        from llmrun.engine.image_encoder import Slice

        running, queued = self._requests.running, self._requests.waiting
        n_queued, embeds = len(queued), self._embeds

        def is_awaited() -> bool:
            is_cancelled = self._last_cancel != last_cancel or bool(self._cancel_wishes)
            return is_cancelled or len(queued) != n_queued or self._embeds != embeds

        seconds = partial(self._scheduler.encoding_seconds, running, embeds=embeds)
        within = Slice(seconds, wait_s, is_awaited, self._begin_encoding)
        failed = self.image_encoder.advance(running, within)
        events: list[Event] = [answer.fail(error) for answer, error in failed]
        if events:
            self._requests.retire()
        return events

    def prefill_progress(self) -> list[PrefillProgress]:
        """Return the progress of the prompts whose images are read, and the expected progress of those in the running
        pass. Thread-safe."""
        found = {} if self.image_encoder is None else self._image_progress(self.image_encoder)
        if (running := self._in_progress) is not None:
            work, seconds = running[0], time.perf_counter() - running[1]
            events = self._scheduler.expected_progress(work, seconds)
            left = self._requests.left((work, seconds)) if events else {}
            for event in events:
                found.setdefault(event.request_id, structs.replace(event, left_s=left.get(event.request_id)))
        return [*found.values()]

    def _image_progress(self, encoder: ImageEncoder) -> dict[int, PrefillProgress]:
        found = {}
        for answer, slot in list(self._requests.running.items()):
            depth = len(slot.tokens)
            if (image := encoder.progress(answer, depth)) is not None:
                known = answer.prompt_tokens, answer.cached_tokens or 0
                found[answer.request_id] = PrefillProgress(answer.request_id, depth, *known, image=image)
        return found

    def generate(self, request: Request) -> Iterator[Event]:
        """Submit one request and yield its events, the last of which is Finished.

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
            self._requests.drop_all()
            self._advance_images(self._last_cancel)  # stops the encoding

    def _end_cancelled(self) -> list[Event]:
        wishes = self._cancel_wishes.copy()
        events = self._requests.end_cancelled(set(wishes), self._last_cancel)
        for _ in wishes:  # not earlier, because `predicted` must not count these requests until they have ended
            self._cancel_wishes.popleft()
        return events

    def cancel(self, request_id: int) -> None:
        """Cancel a request, so that the next `step` ends it with Finished(CANCELLED). Ignores unknown and ended ids."""
        self._cancel_wishes.append(request_id)

    def status(self) -> EngineStatus:
        """Return the state of the engine. Call this method between steps."""
        return self._requests.status()

    def cancel_current(self) -> None:
        """Cancel all waiting and running requests immediately.

        Signal handlers and other threads may call this method. Requests that `submit` is tokenizing are cancelled, too.
        """
        self._last_cancel = next(self._cancel_numbers)
        self._backend.cancel()
        self._speculation.cancel()

    @property
    def state_key(self) -> str:
        """The key of the model and its KV cache in files with saved prefixes, or "" if nothing can be saved."""
        return self._backend.kv.key

    @property
    def saves_blocks(self) -> bool:
        """True if saving a longer version of a sequence adds only new parts (KVCache.saves_blocks)."""
        return self._backend.kv.saves_blocks

    def use_saved(self, saved: SavedPrefixes | None) -> None:
        """Let later requests load prefixes that are longer than the cached ones, and let `save_prefix` save them."""
        self._saved = saved

    def use_state(self, place: StatePlace | None, report: Callable[[str], None]) -> None:
        """Let later requests load their state from a file, and let `save_state` save states there. None for no file.

        report  called with a sentence if the state cannot be used or saved
        """
        from llmrun.engine.saved_state.one_file import SavedFile

        if not (isinstance(self._saved, SavedFile) and self._saved.place == place):
            self._saved = None if place is None else SavedFile(place, self.state_key, report)

    def save_state(self, most: int | None = None) -> None:
        """Save the state of the most recently finished request in the file. `save_prefix` describes the argument."""
        self.save_prefix(most)

    def embedder(self, on_pass: Callable[[int], None] = lambda rows: None) -> Embedder:
        """Return a new object that computes vectors on sequences that no request uses. Call this method between steps.

        on_pass  called before a pass with the number of its rows
        """
        from llmrun.engine.embedding import Embedder

        self._embedder = Embedder(self._backend, self._slots, neighbours=self._requests, on_pass=on_pass)
        return self._embedder

    def save_prefix(self, most: int | None = None, saved: SavedPrefixes | None = None) -> bool:
        """Save tokens of the most recently finished request with unsaved tokens. Call this method between steps.

        most   number of tokens to save, or None for all
        saved  save only requests that use these files; None for the files of `use_saved`
        Returns whether more tokens may remain to be saved.
        """
        saved = saved or self._saved
        return saved is not None and self._slots.save(saved, most)

    def forget(self) -> None:
        """Remove all idle sequences from the KV cache and forget finished answers, so that nothing is reused later."""
        while self._slots.forget_oldest_idle():
            pass
        if self.image_encoder is not None:
            self.image_encoder.recent.forget()
        self._speculation.forget()

    def release_idle_memory(self) -> None:
        """Return to the system the memory that neither requests nor cached prefixes use. Call this between steps.

        A conversation of 4,000 tokens that has left the cache frees 49 MB with SmolLM2 (92 MB with an f16 cache). The
        call takes about 10 ms. Call `forget` before it to return the memory of cached prefixes as well.
        """
        self._backend.kv.return_free_memory()
        if self._backend.draft_head is not None:
            self._backend.draft_head.kv.return_free_memory()
        return_freed_memory()

    def close(self) -> None:
        """Drop all requests and close the backend. Idempotent."""
        self._requests.drop_all()
        self._prompts.close()
        if self.image_encoder is not None:
            self.image_encoder.close()
        self._speculation.close()
        self._backend.close()
        self._keep_speed()
        self.keep_costs()

    def _observe_speed(self, timings: Timings) -> None:
        if timings.steps > _LEAST_STEPS and timings.decode_s > 0:
            # Steps with accepted drafts count once, so drafts never make the speed of a step look better than it is.
            self._best_decode = max(self._best_decode, (timings.steps - 1) / timings.decode_s)
        if timings.prompt_tokens - timings.cached_tokens >= _LEAST_PREFILLED:
            self._best_prefill = max(self._best_prefill, timings.prompt_per_second)

    def keep_costs(self) -> None:
        """Keep the costs of steps for later processes, if they may have changed. Call this method between steps."""
        costs = self._scheduler.costs
        if costs.n_observed >= self._n_kept + _LEAST_KEPT and self._is_real:
            from llmrun.backends.run_speeds import keep_costs

            self._n_kept = costs.n_observed
            keep_costs(self.info, costs.learnt())

    def _assume_costs(self, prompt_tokens: int) -> None:
        """Begin with the costs of an earlier process or, for long prompts, with a forecast, unless costs are known."""
        if self._scheduler.costs.knows_prompts or prompt_tokens <= self._costs_sought:
            return
        is_long = prompt_tokens >= _LONG_PROMPT
        self._costs_sought = sys.maxsize if is_long else _LONG_PROMPT - 1
        if self._is_real:
            from llmrun.backends.prompt_times import assumed_costs

            if (costs := assumed_costs(self.info, may_forecast=is_long)) is not None:
                self._scheduler.costs.assume(costs)

    @property
    def _is_real(self) -> bool:
        """False if the backend answers without a model."""
        from llmrun.backends.registry import is_stand_in

        return not is_stand_in(self.info.backend)

    def _keep_speed(self) -> None:
        """Record the best speeds of this run for `llmrun fit`."""
        decode, prefill, self._best_decode, self._best_prefill = self._best_decode, self._best_prefill, 0.0, 0.0
        if not decode and not prefill:
            return
        if self._is_real:
            from llmrun.backends.run_speeds import keep_run

            keep_run(self.info, decode, prefill)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forward(self, work: list[Work]) -> tuple[list[Work], Outputs]:
        """Run a step and return its work and outputs.

        If the KV cache is too full for drafts and for tokens that are certain to follow, run the step without them.
        """
        self._in_progress = work, time.perf_counter()
        try:
            return work, self._backend.forward(batch_of(work))
        except Cancelled:
            self._slots.recount([part.slot for part in work])
            raise
        except KVFull:
            if not any(part.certain or part.draft.tokens for part in work):
                raise
        finally:
            self._in_progress = None
        return self._forward([structs.replace(part, certain=(), draft=NO_DRAFT) for part in work])

    def _cut_back(self, part: Work) -> None:
        """Remove from the cache the rows of tokens that did not become part of the answer."""
        n = max(len(part.answer.tokens) - 1, part.answer.prompt_tokens)
        if n < len(part.slot.tokens) and self._slots.truncate(part.slot, n) < n and part.draft.tokens:
            # With a recurrent model, llama.cpp would have to repeat earlier rows after each wrong draft. (Without a
            # draft, a stop string has ended the answer inside forced tokens, which does not concern drafts.)
            self._speculation.stop()
