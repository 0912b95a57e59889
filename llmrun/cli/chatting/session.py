"""The chat itself: a turn is read, a command is run or a question is answered, and so on until the end of input."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from llmrun.cli.answers.report import AnsweredRequest, show_statistics, waiting_words
from llmrun.cli.answers.thinking import wanted_thinking
from llmrun.cli.arguments.parsing import RANDOM_SEEDS
from llmrun.cli.arguments.prompt import checked_text
from llmrun.cli.chatting import blocks
from llmrun.cli.chatting.conversation import now
from llmrun.cli.chatting.events import ModelChanged, QuestionAsked, Undone
from llmrun.cli.chatting.journal import ConversationFileError
from llmrun.cli.chatting.preferences import CONTEXT, STOP
from llmrun.cli.chatting.saying import Saying
from llmrun.cli.chatting.screen import Meter
from llmrun.cli.chatting.totals import SessionTotals
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import shortened, visible_line
from llmrun.engine.requests import ChatPrompt, Finished, PrefillProgress, Request, TextDelta
from llmrun.errors import ContextExceeded, LlmrunError, NetworkError, TemplateRefused, UsageError
from llmrun.sampling_params import SAMPLING
from llmrun.settings import RULES, with_values
from llmrun.types import FinishReason

if TYPE_CHECKING:
    from llmrun.cli.answers.open_model import OpenModel
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.cli.chatting.preferences import Value
    from llmrun.cli.chatting.record import ConversationRecord
    from llmrun.cli.chatting.screen import AnswerView, Turns
    from llmrun.cli.chatting.signals import Signals
    from llmrun.cli.chatting.store import Store
    from llmrun.engine.base import Answering
    from llmrun.sampling_params import SamplingParams
    from llmrun.settings import Settings

SURVIVED = (
    UsageError,
    ContextExceeded,
    TemplateRefused,
    ConversationFileError,
    NetworkError,
)  # errors of one turn alone
UNDO_OR_CLEAR = "/undo takes back the last exchange, /clear starts over"

_COMMAND = re.compile(r"/(?!/)(?P<name>\S*)(?P<argument>.*)", re.DOTALL)


class RunnableCommand(Protocol):
    """A slash command: `run` gets the chat, and what follows the command's name."""

    @property
    def run(self) -> Callable[[Chat, str], None]: ...


class Chat:
    """One conversation at a time with one open model.

    record       the conversation, and the file it is saved in
    settings     the values of everything that the conversation does not set itself
    variables    more variables for the chat template
    command_for  finds a slash command by its name; raises UsageError for an unknown one
    """

    def __init__(
        self,
        opened: OpenModel,
        *,
        store: Store,
        record: ConversationRecord,
        settings: Settings,
        variables: Mapping[str, Any],
        turns: Turns,
        view: AnswerView,
        signals: Signals,
        command_for: Callable[[str], RunnableCommand],
    ) -> None:
        self.engine: Answering = opened.engine
        self.model = opened.name
        self.store = store
        self.record = record
        self.totals = SessionTotals()
        self._model_sampling = opened.default_sampling
        self._settings = settings
        self._variables = variables
        self._turns = turns
        self._view = view
        self._signals = signals
        self._command_for = command_for
        self._lasting_model = record.conversation.model
        self._draft = ""
        self._over = False

    def run(self) -> int:
        """Turn after turn; the exit code. An error that the chat survives ends it all the same when nobody is there
        to try again."""
        self._offer_unanswered()
        while not self._over:
            try:
                typed = self._read()
                if typed is None:
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
        draft, self._draft = self._draft, ""
        with self._signals.reading():
            return self._turns.read(self.meter, draft)

    def _take(self, typed: str) -> None:
        """One turn: a command, a question, or nothing at all."""
        block = blocks.without_quotes(typed)
        line = typed.strip()
        if block is not None:
            self._ask(block)
        elif command := _COMMAND.fullmatch(typed):
            self._command_for(command["name"]).run(self, command["argument"].strip())
        elif line.startswith("/"):
            self._ask(line.removeprefix("/") if typed.startswith("//") else line)
        else:
            self._ask(typed.rstrip())

    def _ask(self, question: str) -> None:
        if not question.strip():
            return
        self.record.add(QuestionAsked(checked_text(question, "question"), now()))
        self._answer(self._new_seed())

    # What commands ask for

    @property
    def conversation(self) -> Conversation:
        return self.record.conversation

    @property
    def meter(self) -> Meter:
        return Meter(self.model, self.conversation.context_used, self.engine.info.context_size)

    @property
    def sampling(self) -> SamplingParams:
        """How the next answer is drawn, but for its seed."""
        return replace(self._model_sampling, **self._now_set.sampling)

    @property
    def default_system(self) -> str | None:
        return self._settings.system

    def preference(self, name: str) -> Value | None:
        """What holds now, whoever decided it."""
        if name in SAMPLING:
            value: int | float = getattr(self.sampling, name)
            return value
        if name == CONTEXT:
            return self.engine.info.context_size or None
        return self.conversation.preferences.get(name, getattr(self._settings, name, None))

    def answer_again(self) -> None:
        """Answer the last question with another seed."""
        seed = self._new_seed()
        before = self.conversation.exchanges[-1].began
        if before is not None and seed == before.seed:
            seed = (seed + 1) % 2**64
        if self.sampling.temperature <= 0:
            out.note("temperature is 0, so the seed changes nothing: /set temperature 0.8 would")
        self._answer(seed)

    def offer(self, draft: str) -> None:
        """Let the next prompt begin with this text."""
        self._draft = draft

    def go_on_with(self, record: ConversationRecord) -> None:
        """Leave this conversation, which stays saved, for another one, with the model that is open."""
        self.record.close()
        self.record = record
        if record.conversation.model != self._lasting_model:
            record.add(ModelChanged(self._lasting_model))
        self._offer_unanswered()

    def leave(self) -> None:
        self._over = True

    def reply(self, lines: Iterable[str]) -> None:
        """What the user asked to see."""
        out.reply(lines)

    def confirm(self, line: str) -> None:
        """What was done, in a line that --quiet leaves out."""
        if not out.quiet:
            out.reply([line])

    # Answers

    def _answer(self, seed: int) -> None:
        """Answer the last question, and say how it went. A question that could not be answered is taken back and
        offered for editing; an answer that it had stays."""
        wish = wanted_thinking(self.engine, self._now_set, self.conversation.preferences)
        request = Request(
            prompt=ChatPrompt(self.conversation.messages, template_kwargs=self._variables),
            max_tokens=self._now_set.token_limit,
            stop=tuple(self._stops),
            sampling=replace(self.sampling, seed=seed),
            think=wish.think,
            think_budget=wish.think_budget,
        )
        try:
            with self._turns.answering():
                finished = self._stream(request)
        except ContextExceeded as error:
            self._withdraw()
            raise ContextExceeded(str(error), hint=self._room_hint()) from error
        except (TemplateRefused, UsageError, NetworkError):
            self._withdraw()
            raise
        if finished is None:
            self._stopped_early()
            return
        timings = finished.timings
        self.totals.add(timings)
        out.detail(
            f"prompt     {timings.prompt_tokens} tokens, {timings.cached_tokens} of them known from turns before"
        )
        self._explain_length(request, finished)
        last = self.conversation.exchanges[-1]
        done = AnsweredRequest(self.model, self.engine.info, request, last.answer, (), finished, last.thinking)
        show_statistics(done, with_context=not self._turns.interactive)  # a prompt shows it, too

    def _stream(self, request: Request) -> Finished | None:
        """Write down and show an answer as it comes. None: it was stopped before a word of it."""
        hidden, stream = self._now_set.hide_thinking, self._now_set.stream
        with Saying(self.record, self._view, request.sampling.seed, hide_thinking=hidden, stream=stream) as saying:
            for event in self.engine.generate(request):
                if self._signals.stop_wanted:  # also a wish from before the engine knew of the request
                    self.engine.cancel_current()
                if isinstance(event, PrefillProgress):
                    out.progress(waiting_words(event))
                elif isinstance(event, TextDelta):
                    saying.take(event)
                elif isinstance(event, Finished):
                    if event.reason is FinishReason.CANCELLED and not saying.begun:
                        return None
                    saying.finish(event)
                    return event
        raise LlmrunError("the engine ended a request without saying so")

    def _stopped_early(self) -> None:
        if self._signals.end_wanted:  # the question stays in the file without an answer: --continue offers it
            return
        offered = self._withdraw()
        out.note("stopped before the answer began" + ("; the question is taken back" if offered else ""))

    def _withdraw(self) -> bool:
        """Take back a question that has no answer, and offer it for editing. False: it has one."""
        question = self.conversation.unanswered
        if question is None:
            return False
        self.record.add(Undone())
        self.offer(question)
        return True

    def _offer_unanswered(self) -> None:
        """A conversation that ended in a question: the process was ended before the answer began."""
        question = self.conversation.unanswered
        if question is not None and self._withdraw():
            out.note(
                f"the last question had no answer yet, and is taken back: {shortened(visible_line(question), 100)}"
            )

    def _explain_length(self, request: Request, finished: Finished) -> None:
        """No answer is cut in silence."""
        if finished.reason is not FinishReason.LENGTH:
            return
        last = self.conversation.exchanges[-1]
        if last.thoughts and not last.answer:
            advice = ": /set think_budget ends its thinking earlier" if self.engine.thinking else ""
            out.note(f"the answer was cut while the model was thinking{advice}")
        generated = finished.timings.generated_tokens
        counted = finished.timings.prompt_tokens > 0  # or else a server's pieces were, which may be several tokens
        if request.max_tokens is not None and (generated >= request.max_tokens or not counted):
            out.note(f"the answer was cut after {generated} tokens, as set: /set max_tokens")
        elif not (size := self.engine.info.context_size):
            where = self.engine.info.device
            out.note(f"the answer was cut by {where}: its context may be full: {UNDO_OR_CLEAR}")
        else:
            out.note(f"the answer was cut: the context of {size:,} tokens is full: {UNDO_OR_CLEAR}")

    def _room_hint(self) -> str:
        info = self.engine.info
        hint = UNDO_OR_CLEAR if self.conversation.exchanges else "shorten it"
        if info.context_size < info.train_context:
            hint += f"; llmrun chat --continue --ctx-size N has more room (trained for {info.train_context:,})"
        return hint

    @property
    def _now_set(self) -> Settings:
        chosen = {name: value for name, value in self.conversation.preferences.items() if name in RULES}
        return with_values(self._settings, chosen)

    @property
    def _stops(self) -> list[str]:
        stops = self.conversation.preferences.get(STOP, [])
        return stops if isinstance(stops, list) else []

    def _new_seed(self) -> int:
        seed = self._now_set.seed
        return secrets.randbelow(RANDOM_SEEDS) if seed is None else seed
