"""The main loop of a chat, which reads turns and for each turn runs a command or answers a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.base.errors import (
    BackendCrashed,
    ContextExceeded,
    InvalidAnswer,
    LlmrunError,
    NetworkError,
    TemplateRefused,
    UsageError,
)
from llmrun.base.types import FinishReason, Timings
from llmrun.cli.answers.answering import next_seed, sent_sampling
from llmrun.cli.answers.report import (
    AnsweredRequest,
    check_format,
    explain_length,
    prompt_reporter,
    show_statistics,
)
from llmrun.cli.answers.thinking import wanted_thinking
from llmrun.cli.arguments.images import COMMAND, tell_of_image, tell_of_paths_in_text
from llmrun.cli.arguments.prompts import checked_text
from llmrun.cli.chatting import plain
from llmrun.cli.chatting.context import (
    FORGET_HINT,
    UNDO_OR_CLEAR,
    ContextUsed,
    ModelSettings,
    PromptWindow,
    offer_tools,
)
from llmrun.cli.chatting.conversation import new_conversation, now
from llmrun.cli.chatting.events import CONTEXT, FORGET, ON_FULL, STOP, QuestionAsked, Undone, chosen_format
from llmrun.cli.chatting.image_files import ImageFileError
from llmrun.cli.chatting.plain import Meter
from llmrun.cli.chatting.saying import ConversationRecord, Saying
from llmrun.cli.chatting.store import ConversationFileError
from llmrun.cli.chatting.tool_turns import CONTINUES, MOST_ROUNDS, ToolTurns
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import shortened, visible_line
from llmrun.engine.requests import Finished, PrefillProgress, Request, TextDelta
from llmrun.options.sampling_params import SAMPLING

if TYPE_CHECKING:
    from llmrun.cli.arguments.images import GivenImage
    from llmrun.cli.chatting.context import Prompting
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.cli.chatting.draft_images import DraftImages
    from llmrun.cli.chatting.events import Value
    from llmrun.cli.chatting.model_in_use import ModelInUse
    from llmrun.cli.chatting.plain import AnswerView, Turns
    from llmrun.cli.chatting.signals import Signals
    from llmrun.cli.chatting.store import Store
    from llmrun.engine.base import Answering
    from llmrun.engine.requests import ToolCall
    from llmrun.engine.tools.toolbox import Toolbox
    from llmrun.options.sampling_params import SamplingParams
    from llmrun.options.settings import Settings


class ImageFailed(LlmrunError):
    """The model could not read an image, but can answer other questions."""


# The following errors end the turn, but not the chat.
SURVIVED = (
    *(UsageError, ContextExceeded, TemplateRefused, ConversationFileError, ImageFileError, ImageFailed),
    *(NetworkError, InvalidAnswer),
)

_COMMAND = re.compile(r"/(?!/)(?P<name>\S*)(?P<argument>.*)", re.DOTALL)


class Chat:
    """A chat with one open model, in one conversation at a time.

    models        the open model; the caller closes it
    record        the conversation and its file
    settings_for  a function that returns the settings of a model or preset, which the conversation may override
    prompting     creates prompts from messages, and contains the tools
    run_command   runs the slash command with a given name and argument; raises UsageError for an unknown name
    images        the images of drafts, in which a character stands for each image
    """

    def __init__(
        self,
        models: ModelInUse,
        *,
        store: Store,
        record: ConversationRecord,
        settings_for: Callable[[str], Settings],
        prompting: Prompting,
        turns: Turns,
        view: AnswerView,
        signals: Signals,
        run_command: Callable[[Chat, str, str], None],
        images: DraftImages,
    ) -> None:
        self.store = store
        self.record = record
        self.totals: list[Timings] = []  # the timings of all answers that have at least one token
        self.last_answer: AnsweredRequest | None = None  # in any conversation of this chat
        self.draft = ""  # the text with which the current prompt was prefilled
        self.failed_question = ""  # the draft if it is a question that could not be answered, or ""
        self._models = models
        self._settings = ModelSettings(settings_for, prompting, models.lasting_name)
        self._turns = turns
        self._view = view
        self._signals = signals
        self._run_command = run_command
        self.images = images
        images.measure = models.measure
        prompting.image_file = self._image_file
        self._told: set[tuple[str, str]] = set()  # images whose notes were printed, with the names of the models
        self._next_draft = ""
        self._failed = ""
        self._window = PromptWindow(prompting)
        self._context_used = ContextUsed(prompting)
        self._tools = ToolTurns(prompting.toolbox, turns, signals) if prompting.toolbox else None
        self._calls: Sequence[ToolCall] = ()  # the calls of the last answer
        self._over = False

    def run(self) -> int:
        """Read and process turns until the chat ends, and return the exit code.

        Any error ends a chat that is not interactive, because no user can try again.
        """
        self._offer_unanswered()
        while not self._over:
            try:
                typed = self._read()
                if typed is None:
                    self._tell_of_unsent_images()
                    return 0
                self._take(typed)
            except KeyboardInterrupt:
                if not self._turns.interactive:
                    raise
            except SURVIVED as error:
                if not self._turns.interactive:
                    raise
                out.error(str(error), error.hint)
            if self._signals.end_wanted or (self._signals.stop_wanted and not self._turns.interactive):
                return self._signals.exit_code
        return 0

    def _read(self) -> str | None:
        self.draft, self._next_draft = self._next_draft, ""
        self.failed_question, self._failed = self._failed, ""
        self.images.keep_only(self.draft + self.failed_question)
        self.images.before = len(self.conversation.images)
        with self._signals.reading():
            typed = self._turns.read(self.meter, self.draft)
        if typed is not None and not self._turns.edits_drafts and self._only_images(self.draft):
            typed = self.draft + typed
        return typed

    def _take(self, typed: str) -> None:
        """Process one turn, which may be a command, a question or empty."""
        lead = self.images.leading(typed)
        typed, images = typed.removeprefix(lead), "".join(lead.split())
        block = plain.without_quotes(typed)
        line = typed.strip()
        if block is not None:
            self.ask(images + block)
        elif command := _COMMAND.fullmatch(typed):
            if self.images.within(command["argument"]):
                raise UsageError(f"/{command['name']}: only questions can have images", hint="/image FILE adds one")
            self.offer(images)
            self._run_command(self, command["name"], command["argument"].strip())
        elif line.startswith("/"):
            self.ask(images + (line.removeprefix("/") if typed.startswith("//") else line))
        else:
            self.ask(images + typed.rstrip())

    # Methods for the slash commands

    def ask(self, question: str) -> None:
        """Ask a question and answer it. Empty questions are ignored."""
        if not question.strip():
            return
        lead = self.images.leading(question)
        question = "".join(lead.split()) + question.removeprefix(lead)
        text, shown = self.images.parted(question)
        given = self.images.within(question)
        if not given:
            tell_of_paths_in_text(text, COMMAND)
        for image in given:
            self.record.hold(image.sha256, image.data)
        self.record.add(QuestionAsked(checked_text(text, "question"), now(), shown))
        self._answer(self._new_seed(), given)

    @property
    def engine(self) -> Answering:
        return self._models.opened.engine

    @property
    def model(self) -> str:
        return self._models.opened.title

    @property
    def conversation(self) -> Conversation:
        return self.record.conversation

    @property
    def meter(self) -> Meter:
        return Meter(self.context_used or 0, self.engine.info.context_size)

    @property
    def context_used(self) -> int | None:
        """The number of tokens in the conversation, or None if only the next answer will report the number."""
        return self._context_used.tokens(self.engine, self.conversation)

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the next answer, without the seed."""
        return replace(self._models.opened.default_sampling, **self._now_set.sampling)

    @property
    def sent_sampling(self) -> frozenset[str] | None:
        """The names of the sampling parameters that are sent to the server, or None for local models."""
        return sent_sampling(self.engine, self._now_set)

    @property
    def toolbox(self) -> Toolbox | None:
        """The tools that the model may call."""
        return self._window.prompting.toolbox

    @property
    def default_system(self) -> str | None:
        return self._settings.base.system

    def preference(self, name: str) -> Value | None:
        """Return the current value of a preference, or None if the server chooses the value."""
        if name in SAMPLING:
            if self.sent_sampling is not None and name not in self.sent_sampling:
                return None
            value: int | float | str = getattr(self.sampling, name)
            return value
        if name == CONTEXT:
            return self.engine.info.context_size or None
        return self.conversation.preferences.get(name, getattr(self._settings.base, name, None))

    def answer_again(self) -> None:
        """Answer the last question with another seed."""
        seed = self._new_seed()
        if seed is not None and seed == self._last_seed:
            seed = (seed + 1) % 2**64
        if self.preference("temperature") == 0:
            out.note("temperature is 0, so another seed gives the same answer: try /set temperature 0.8")
        self._answer(seed)

    def add_images(self, images: Sequence[GivenImage]) -> None:
        """Put images into the next question. Raises UsageError if there are too many."""
        signs = "".join(self.images.add(image) for image in images)
        if not self._turns.edits_drafts:
            for sign in signs:
                self.confirm(self.images.label(sign, self._next_draft + signs) or "")
        self.offer(f"{self._next_draft}{signs}")

    def _only_images(self, draft: str) -> bool:
        return bool(draft) and self.images.leading(draft) == draft

    def _tell_of_unsent_images(self) -> None:
        if not self._turns.edits_drafts and self._only_images(self.draft):
            out.note("no question followed the image, so the model has not seen it")

    def _image_file(self, sha256: str) -> bytes:
        """Return the file of an image of the conversation. Raises ImageFileError."""
        return self.record.image(next(image for image in self.conversation.images if image.sha256 == sha256))

    def draft_of(self, asked: QuestionAsked) -> str:
        """Return a question of the conversation as a draft."""
        return self.images.draft_of(asked, self.record.image)

    def switch_model(self, name: str) -> None:
        """Continue this conversation with another model. Do nothing if the other model is already in use.

        If the model cannot be opened, the current model stays in use and the error is raised. Ctrl-C stops a download.
        """
        try:
            with self._turns.answering(), self._signals.reading():
                switched = self._models.switch(name, images=bool(self.conversation.images))
        finally:
            self._models.reopen()
        if switched:
            if self.engine.thinking:
                self.engine.thinking.prepare()
            self._settings.use(self._models.lasting_name)
            self._settings.take_over(self.record)
            self._begin_with_context()

    def resize_context(self, size: int | None) -> None:
        """Reopen the model with another context size, or None for the default.

        If this fails, the current size stays in use and the error is raised.
        """
        try:
            with self._turns.answering(), self._signals.reading():
                self._models.resize(self._settings.base.ctx_size if size is None else size)
        finally:
            self._models.reopen()
        self._begin_with_context()

    def see_images(self) -> None:
        """Reopen the model with its projector, unless it is open with it. If this fails, reopen the model as it was.

        Raises UsageError, because the chat goes on without images, and KeyboardInterrupt.
        """
        if self.engine.sees_images:
            return
        try:
            with self._turns.answering(), self._signals.reading():
                self._models.see_images()
        except (LlmrunError, OSError) as error:
            raise UsageError(str(error), hint=getattr(error, "hint", "")) from error
        finally:
            self._models.reopen()
        self._begin_with_context()

    def _begin_with_context(self) -> None:
        """Prepare the prompts for another model or context size, which may have room for more tokens."""
        self._window.left_out = 0
        offer_tools(self._window.prompting, self.engine, self.model, self.conversation)

    @property
    def interactive(self) -> bool:
        """True if the turns come from a person, who can try again after an error."""
        return self._turns.interactive

    def lend_terminal(self) -> AbstractContextManager[None]:
        """Return a context manager that makes the terminal available to another program."""
        return self._turns.lent()

    def offer(self, draft: str) -> None:
        """Prefill the next prompt with this text."""
        self._next_draft = draft

    def switch_to(self, record: ConversationRecord) -> None:
        """Switch to another conversation without changing the model. The current conversation stays saved."""
        self.record.close()
        self.record = record
        self._window.left_out = 0
        if record.conversation.model != self._models.lasting_name:
            self._settings.take_over(record)
        offer_tools(self._window.prompting, self.engine, self.model, self.conversation)
        self._offer_unanswered()

    def start_over(self) -> None:
        """Start an empty conversation with the current system prompt and settings. The old conversation stays saved."""
        fresh = new_conversation(self._models.lasting_name)
        fresh.system = self.conversation.system
        fresh.preferences = dict(self.conversation.preferences)
        self.switch_to(ConversationRecord(self.store, fresh))

    def leave(self) -> None:
        self._over = True

    def confirm(self, line: str) -> None:
        """Print a line that confirms what a command did, unless --quiet is set."""
        if not out.quiet:
            out.reply([line])

    # Answers

    def _tell_of_images(self, given: Sequence[GivenImage]) -> None:
        """Print notes about images that the current model sees for the first time."""
        for image in given:
            if (known := (image.sha256, self._models.lasting_name)) not in self._told:
                self._told.add(known)
                tell_of_image(image, self._models.measure(image.header))

    def _answer(self, seed: int | None, given: Sequence[GivenImage] = ()) -> None:
        """Answer the last question, and run the tools that the model calls before its final answer.

        given  the images of the question, if they are new
        """
        if self.conversation.images:
            try:
                self.see_images()
            except (UsageError, KeyboardInterrupt):
                self._withdraw()
                raise
        self._tell_of_images(given)
        if self._tools is not None:
            self._tools.refresh()
        for _ in range(MOST_ROUNDS):
            calls = self._answer_once(seed)
            if calls and self._tools is None:
                out.note("the model called a tool, but this chat has no tools")
            if not calls or self._tools is None or not self._tools.run(calls, self.record):
                return
        out.note(f"the model called tools in {MOST_ROUNDS} answers in a row, so it was stopped; {CONTINUES}")

    def _answer_once(self, seed: int | None) -> Sequence[ToolCall]:
        """Answer the last question, and return the tool calls of the answer.

        If no answer begins and there is no earlier answer, withdraw the question.
        """
        try:
            request = self._request(seed)
        except ImageFileError:
            self._withdraw()
            raise
        try:
            finished = self._stream_what_fits(request)
        except ContextExceeded as error:
            refusal = self._window.refusal(self.engine, self.conversation, request, error)
            self._withdraw()
            raise refusal from error
        except (TemplateRefused, UsageError, NetworkError):
            self._withdraw()
            raise
        except LlmrunError as error:
            if not self.conversation.images or isinstance(error, BackendCrashed):
                raise
            self._withdraw()
            raise ImageFailed(str(error), hint=error.hint) from error
        if finished is None:
            self._stopped_early()
            return ()
        timings = finished.timings
        if timings.generated_tokens:
            self.totals.append(timings)
        out.detail(f"prompt     {timings.prompt_tokens} tokens, {timings.cached_tokens} of them cached")
        last = self.conversation.exchanges[-1]
        done = AnsweredRequest(self.model, self.engine.info, request, last.answer, (), finished, last.thinking)
        self.last_answer = done
        forgets = self.preference(ON_FULL) == FORGET
        explain_length(
            done,
            thinking="/set think_budget limits the thinking",
            limit="/set max_tokens changes the limit",
            context="the next prompt will leave out the oldest turns" if forgets else FORGET_HINT,
            reset=f"; {UNDO_OR_CLEAR}",
        )
        # Some servers report the reason "stop" for an answer with calls.
        calls = self._calls if finished.reason in (FinishReason.TOOL_CALLS, FinishReason.STOP) else ()
        if not calls or out.verbose:
            show_statistics(done)
        check_format(done)
        return calls

    def _request(self, seed: int | None) -> Request:
        """Return the request for the next answer, without the turns that were already left out."""
        settings, preferences = self._now_set, self.conversation.preferences
        wish = wanted_thinking(self.engine, settings, preferences)
        stops = preferences.get(STOP, [])
        return Request(
            prompt=self._window.prompt(self.conversation),
            max_tokens=settings.token_limit,
            stop=tuple(stops) if isinstance(stops, list) else (),
            sampling=replace(self.sampling, seed=seed or 0),
            think=wish.think,
            think_budget=wish.think_budget,
            response_format=chosen_format(preferences),
            sent_sampling=self.sent_sampling,
        )

    def _stream_what_fits(self, request: Request) -> Finished | None:
        """Stream the answer. If `on_full` is `forget`, leave out the oldest turns that do not fit in the context."""
        window, forgets = self._window, self.preference(ON_FULL) == FORGET
        left_out_before = window.left_out
        if forgets:
            request = window.fitted(self.engine, self.conversation, request)
        while True:
            try:
                with self._turns.answering():
                    return self._stream(request)
            except ContextExceeded:
                fewer = window.fitted_better(self.engine, self.conversation, request) if forgets else None
                if fewer is None:
                    window.left_out = left_out_before  # the next question may be shorter and may fit
                    raise
                request = fewer

    def _stream(self, request: Request) -> Finished | None:
        """Save and show an answer as it streams. Returns None if the answer was stopped before its first text."""
        hidden, stream = self._now_set.hide_thinking, self._now_set.stream
        saying = Saying(self.record, self._view, request.seed, hide_thinking=hidden, stream=stream)
        with self._models.saving(self.record.path), saying, prompt_reporter(self.engine, request) as waiting:
            for event in self.engine.generate(request):
                if self._signals.stop_wanted:  # the signal may have arrived before the engine received the request
                    self.engine.cancel_current()
                if not isinstance(event, PrefillProgress):
                    waiting.end()
                if isinstance(event, TextDelta):
                    saying.take(event)
                elif isinstance(event, Finished):
                    if event.reason is FinishReason.CANCELLED and not saying.begun:
                        return None
                    saying.finish(event)
                    self._calls = saying.calls.calls
                    return event
        raise LlmrunError("the engine stopped without reporting the end of the answer")

    def _stopped_early(self) -> None:
        if self._signals.end_wanted:  # the unanswered question stays in the file, and --continue offers it again
            return
        happened = "the question was removed" if self._withdraw() else ""
        happened = CONTINUES if self.conversation.is_stopped_at_calls else happened
        out.note("; ".join(filter(None, ["stopped before the answer began", happened])))

    def _withdraw(self) -> bool:
        """Remove the last question and offer it for editing. Returns False if the question already has an answer."""
        if self.conversation.unanswered is None:
            return False
        question = self.draft_of(self.conversation.exchanges[-1].asked)
        self.record.add(Undone())
        self.offer(self._next_draft + question)
        self._failed = question
        return True

    def _offer_unanswered(self) -> None:
        """Offer the last question for editing if a previous process ended before the answer began."""
        if self.conversation.is_stopped_at_calls:
            out.note(f"the last answer was stopped while it called tools; {CONTINUES}")
        question = self.conversation.unanswered
        if question is not None:
            question = self.conversation.shown_question(self.conversation.exchanges[-1])
        if question is not None and self._withdraw():
            out.note(f"the last question was not answered, so it was removed: {shortened(visible_line(question), 100)}")

    @property
    def _now_set(self) -> Settings:
        return self._settings.of(self.conversation)

    @property
    def _last_seed(self) -> int | None:
        began = self.conversation.exchanges[-1].began
        return began.seed if began else None

    def _new_seed(self) -> int | None:
        return next_seed(self.engine, self._now_set)
