"""Talk with a model. /help lists the commands; every conversation is saved as it goes.

If the input is a pipe, every line is a turn; triple quotes begin and end a turn of several lines.

Examples:
    llmrun chat
    llmrun chat qwen3:4b --continue
    llmrun chat ./file.gguf -s "Be brief."
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.arguments.flags import AnswerFlags, takes_answer_flags
from llmrun.cli.arguments.parsing import parse_stops, parse_template_variables
from llmrun.cli.arguments.prompt import checked_text, read_text
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_move_cursor, is_terminal
from llmrun.errors import LlmrunError, TemplateRefused, UsageError
from llmrun.folders import data_folder
from llmrun.settings import RULES, Settings, load_settings, with_values

if TYPE_CHECKING:
    from llmrun.cli.answers.open_model import OpenModel
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.cli.chatting.events import Event
    from llmrun.cli.chatting.record import ConversationRecord
    from llmrun.cli.chatting.screen import AnswerView, Completions, Turns
    from llmrun.cli.chatting.store import Store
    from llmrun.cli.chatting.typing_ahead import QuietKeyboard
    from llmrun.types import ModelInfo

LISTING = {"place": 10, "aliases": ("run",)}


@takes_answer_flags
def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A name of the catalogue, a .gguf file, or a server's URL#MODEL; as -m."
        ),
    ] = None,
    continued: Annotated[
        bool, typer.Option("--continue", help="Take up the last conversation, with its settings and its model.")
    ] = False,
    *,
    flags: AnswerFlags,
) -> int:
    if name is not None and flags.model is not None:
        raise UsageError("model: given twice: as an argument and as --model")
    flags = flags if name is None else replace(flags, model=name)
    settings = flags.settings()
    template = read_text(flags.chat_template, "--chat-template") if flags.chat_template is not None else None
    variables = parse_template_variables(flags.chat_template_kwargs)
    from llmrun.cli.chatting.events import ModelChanged
    from llmrun.cli.chatting.store import Store

    store = Store(data_folder() / "conversations")
    with (
        _keyboard() as keyboard,
        closing(_last(store) if continued else _new(store, settings)) as record,
    ):
        flags.check_model(settings.model if flags.model is not None else record.conversation.model)
        for event in list(_said(flags, settings, record.conversation)):
            if event != ModelChanged(record.conversation.model):
                record.add(event)
        from llmrun.cli.answers.open_model import open_model

        with open_model(_for_opening(settings, record), chat_template=template, will_chat=True) as opened:
            return _talk(opened, store, record, flags, variables, keyboard)


def _said(flags: AnswerFlags, settings: Settings, before: Conversation) -> Iterator[Event]:
    """Yield what the flags change in a conversation; these changes are saved with it. Raises UsageError."""
    from llmrun.cli.answers.open_model import lasting_name
    from llmrun.cli.chatting.events import ModelChanged, PreferenceSet, SystemSet
    from llmrun.cli.chatting.preferences import NAMES, STOP, THINK_BUDGET, checked_value

    if flags.model is not None:
        yield ModelChanged(lasting_name(settings))
    if flags.system is not None:
        yield SystemSet(checked_text(flags.system, "--system"))
    if flags.think and flags.think_budget is None and before.preferences.get(THINK_BUDGET) == 0:
        yield PreferenceSet(THINK_BUDGET, None)  # an earlier run forbade thinking; this one asks for it
    for key, value in flags.given().items():
        if key in NAMES:
            yield PreferenceSet(key, checked_value(key, value))
    if flags.stop:
        yield PreferenceSet(STOP, [*parse_stops(flags.stop)])


def _unsaid(flags: AnswerFlags) -> Settings:
    """Return the settings that apply where a conversation sets nothing itself."""
    from llmrun.cli.chatting.preferences import NAMES

    return load_settings({key: value for key, value in flags.given().items() if key not in NAMES})


def _new(store: Store, settings: Settings) -> ConversationRecord:
    from llmrun.cli.answers.open_model import lasting_name
    from llmrun.cli.chatting.conversation import new_conversation
    from llmrun.cli.chatting.record import ConversationRecord

    conversation = new_conversation(lasting_name(settings))
    conversation.system = settings.system
    return ConversationRecord(store, conversation)


def _last(store: Store) -> ConversationRecord:
    from llmrun.cli.chatting.actions import summary
    from llmrun.cli.chatting.record import take_up

    path = store.latest()
    if path is None:
        raise LlmrunError("--continue: there is no conversation yet", hint="llmrun chat begins one")
    record, found = take_up(store, path)
    out.note(f"going on with {summary(found)}")
    return record


def _for_opening(settings: Settings, record: ConversationRecord) -> Settings:
    conversation = record.conversation
    chosen = {key: value for key, value in conversation.preferences.items() if key in RULES}
    return with_values(settings, {"model": conversation.model, **chosen})


def _talk(
    opened: OpenModel,
    store: Store,
    record: ConversationRecord,
    flags: AnswerFlags,
    variables: Mapping[str, Any],
    keyboard: QuietKeyboard | None = None,
) -> int:
    from llmrun.cli.answers.thinking import check_thinking
    from llmrun.cli.chatting.commands import command_for, completions
    from llmrun.cli.chatting.session import Chat
    from llmrun.cli.chatting.signals import Signals

    engine = opened.engine
    if not engine.takes_chats:
        raise TemplateRefused(
            f"no chat template: {engine.info.path}: tokenizer.chat_template is absent, and the vocabulary is of no "
            "known family",
            hint="give it one with --chat-template FILE, or complete texts with llmrun generate --raw",
        )
    settings = _unsaid(flags)
    check_thinking(engine, flags, settings, record.conversation.preferences)
    with (
        closing(_turns(lambda before: completions(conversing, before), keyboard)) as turns,
        Signals(engine.cancel_current, turns.restore) as signals,
    ):
        conversing = Chat(
            opened,
            store=store,
            record=record,
            settings=settings,
            variables=variables,
            turns=turns,
            view=_view(),
            signals=signals,
            command_for=command_for,
        )
        if turns.interactive:
            out.fields([*_introduction(opened.name, engine.info), "/help lists the commands"])
        try:
            return conversing.run()
        finally:
            conversing.record.close()  # /load may have changed it


def _introduction(name: str, info: ModelInfo) -> list[str]:
    if info.backend == "remote":
        return [f"{name} @ {info.device}"]
    return [name, f"context {info.context_size:,} tokens"]


@contextmanager
def _keyboard() -> Iterator[QuietKeyboard | None]:
    """Hold what is typed while the model loads, for the first prompt. Yields None where turns are not edited."""
    if not (can_move_cursor(sys.stdin) and (is_terminal(sys.stdout) or is_terminal(sys.stderr))):
        yield None
        return
    from llmrun.cli.chatting.typing_ahead import quiet_keyboard

    keyboard = quiet_keyboard()
    try:
        keyboard.hold()
        yield keyboard
    finally:
        keyboard.end()


def _turns(completions: Completions, keyboard: QuietKeyboard | None) -> Turns:
    if keyboard is not None:
        from llmrun.cli.chatting.keyboard import TerminalTurns

        return TerminalTurns(completions, keyboard)
    from llmrun.cli.chatting.plain import PlainTurns

    return PlainTurns(sys.stdin.buffer, interactive=is_terminal(sys.stdin))


def _view() -> AnswerView:
    if can_move_cursor(sys.stdout):
        from llmrun.cli.chatting.markdown import MarkdownView

        return MarkdownView()
    from llmrun.cli.chatting.plain import PlainView

    return PlainView()
