"""Talk with a model. /help lists the commands. Every conversation is saved automatically.

--continue NAME continues a conversation, and --continue alone continues the last conversation. The beginning of a name
is enough if it is unique. If no conversation has this name but a model does, --continue selects the model.

If the input is a pipe, every line is a turn. Triple quotes enclose a turn of several lines.

Examples:
    llmrun chat
    llmrun chat qwen3:4b --continue
    llmrun chat --continue why-is-the-sky-blue
    llmrun chat ./file.gguf -s "Be brief."
    llmrun chat gemma3:4b --image cat.jpg
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import conversations_folder
from llmrun.cli.arguments.options import NAMES as FORMATS
from llmrun.cli.arguments.options import (
    AnswerFlags,
    files,
    models,
    names_a_model,
    one_model,
    parse_stops,
    parse_template_variables,
    speed_option,
    takes_answer_flags,
)
from llmrun.cli.arguments.prompts import STDIN, filled_system, read_text
from llmrun.cli.chatting.archive import conversation_names
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_move_cursor, is_terminal
from llmrun.options.presets import ONLY_INPUT
from llmrun.options.settings import RULES, Settings, load_settings, model_named, with_model, with_values

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.cli.answers.answering import OpenModel
    from llmrun.cli.arguments.images import GivenImage
    from llmrun.cli.chatting.context import ConversationState, Prompting
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.cli.chatting.draft_images import DraftImages
    from llmrun.cli.chatting.events import Event
    from llmrun.cli.chatting.model_in_use import ModelInUse
    from llmrun.cli.chatting.plain import Completions, Turns
    from llmrun.cli.chatting.saying import ConversationRecord
    from llmrun.cli.chatting.store import Store
    from llmrun.cli.chatting.typing_ahead import QuietKeyboard
    from llmrun.engine.tools.toolbox import Toolbox
    from llmrun.engine.tools.tools_file import ToolsFile

LISTING = {
    "heading": "Run models",
    "place": 10,
    "aliases": ("run",),
    "extra": '`llmrun generate -m MODEL "text"` answers one question',
}
LAST = ""  # the value of --continue without a name


@takes_answer_flags()
def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model, a preset, a .gguf file, or a server's URL#MODEL.",
            autocompletion=models,
        ),
    ] = None,
    continued: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="[NAME]",
            help="Continue a conversation.  [default: the last one]",
            autocompletion=conversation_names,
        ),
    ] = None,
    *,
    flags: AnswerFlags,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="FILE", help="Add an image to the first question.", autocompletion=files),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE", help="Let the model call tools declared in a TOML or JSON file."),
    ] = None,
    save_state: Annotated[
        bool | None,
        speed_option("--save-state/--no-save-state", help="Save the KV cache for --continue.  [default: save-state]"),
    ] = None,
) -> int:
    flags = replace(flags, model=one_model(name, flags.model))
    from llmrun.cli.chatting.store import Store

    store = Store(conversations_folder())
    if continued and flags.model is None and _is_model(continued, store):
        flags, continued = replace(flags, model=continued), LAST
    settings = flags.settings()
    chooses_model = continued is None or flags.model is not None  # otherwise, the conversation's own model is used
    preset = settings.preset
    if chooses_model and preset is not None and preset.prompt not in (None, ONLY_INPUT):
        out.note(f"preset {preset.name}: a chat uses the preset's system prompt and settings, but not its prompt")
    settings = _with_system(settings, flags, strict=chooses_model and flags.system is None)
    if save_state is not None:
        settings = replace(settings, save_state=save_state)
    images = _images(image or ())
    template = read_text(flags.chat_template, "--chat-template") if flags.chat_template is not None else None
    variables = parse_template_variables(flags.chat_template_kwargs)
    with (
        _keyboard() as keyboard,
        closing(_new(store, settings) if continued is None else _earlier(store, continued)) as record,
    ):
        flags.check_model(settings.model if flags.model is not None else model_named(record.conversation.model))
        changes = list(_changes(flags, settings, record.conversation))
        wanted = copy.deepcopy(record.conversation)
        for event in changes:
            wanted.apply(event)
        from llmrun.cli.answers.answering import tell_of_default_model
        from llmrun.cli.answers.thinking import check_thinking
        from llmrun.cli.chatting.context import Prompting
        from llmrun.cli.chatting.model_in_use import ModelInUse

        if chooses_model and flags.model is None:
            tell_of_default_model(settings)
        settings_for = functools.partial(_base_settings, flags)
        opening = _for_opening(settings, wanted)
        opener = _Opener(flags, opening, template, wanted.model)
        declared = _declared_tools(tools, wanted)
        sees = bool(images or wanted.images)
        state = _state(store, settings)
        with (
            closing(ModelInUse(opener, wanted.model, state, opening.ctx_size, images=sees)) as models,
            _opened_tools(declared, models, wanted) as toolbox,
        ):
            check_thinking(models.opened.engine, flags, settings_for(wanted.model), wanted.preferences)
            for event in changes:  # saving follows the checks, so conversations never switch to an unusable model
                record.add(event)
            return _talk(models, store, record, settings_for, Prompting(variables, toolbox), keyboard, images)


@dataclass(frozen=True, slots=True)
class _Opener:
    """A ModelOpener for one chat. Only the `first` model uses `template` and the adapters of --lora."""

    flags: AnswerFlags
    settings: Settings
    template: str | None
    first: str

    def fetch(self, name: str, *, images: bool) -> str:
        from llmrun.cli.answers.answering import fetch_model, lasting_name

        wanted = with_model(self.settings, name)
        self.flags.check_model(wanted.model)
        lasting = lasting_name(wanted)
        if lasting != self.first:
            for flag, value in (("--chat-template", self.template), ("--lora", self.settings.loras)):
                if value:
                    out.note(f"{flag} applies only to the first model")
            wanted = replace(wanted, loras=())
            _base_settings(self.flags, name, strict=True)
        fetch_model(wanted, images=images)
        return lasting

    def open(self, name: str, context_size: int | None, *, images: bool) -> AbstractContextManager[OpenModel]:
        from llmrun.cli.answers.answering import open_model

        template, settings = self.template, replace(with_model(self.settings, name), ctx_size=context_size)
        if name != self.first:
            template, settings = None, replace(settings, loras=())
        return open_model(
            settings, chat_template=template, will_chat=True, saves_state=settings.save_state, images=images
        )


def _images(paths: Sequence[str]) -> Sequence[GivenImage]:
    """Read the images of --image before the model loads. Raises UsageError."""
    if not paths:
        return ()
    from llmrun.cli.arguments.images import read_images

    if STDIN in paths:
        raise UsageError("--image -: the questions of a chat come from standard input", hint="name a file")
    return read_images(paths)


def _with_system(settings: Settings, flags: AnswerFlags, *, strict: bool) -> Settings:
    """Return the settings with the variables of the system prompt filled in.

    A conversation keeps its system prompt, so a variable without a value is an error only when a system prompt is
    chosen. Without `strict`, a system prompt with such a variable is left out.

    strict  whether to raise UsageError for a variable without a value
    """
    try:
        return replace(settings, system=filled_system(settings, flags.prompt_values()))
    except UsageError:
        if strict:
            raise
        return replace(settings, system=None)


def _changes(flags: AnswerFlags, settings: Settings, before: Conversation) -> Iterator[Event]:
    """Yield the events that apply the flags to a conversation and are stored in it. Raises UsageError."""
    from llmrun.cli.answers.answering import lasting_name
    from llmrun.cli.chatting.events import NAMES, STOP, THINK_BUDGET, PreferenceSet, SystemSet, checked_value

    if flags.model is not None and (name := lasting_name(settings)) != before.model:
        yield from before.switched(name, _base_settings(flags, before.model).system, settings.system)
    if flags.system is not None:
        yield SystemSet(flags.system)
    if flags.think and flags.think_budget is None and before.preferences.get(THINK_BUDGET) == 0:
        yield PreferenceSet(THINK_BUDGET, None)  # reset the saved budget of 0, which would prevent thinking
    for key, value in flags.given().items():
        if key in NAMES:
            yield PreferenceSet(key, checked_value(key, value))
    if flags.stop:
        yield PreferenceSet(STOP, [*parse_stops(flags.stop)])
    if (wanted := flags.response_format()) is not None:
        for name in FORMATS:
            yield PreferenceSet(name, wanted.text if name == wanted.kind else None)


def _base_settings(flags: AnswerFlags, model: str, *, strict: bool = False) -> Settings:
    """Return the settings for a model or a preset that apply unless the conversation overrides them.

    strict  the same as in `_with_system`
    """
    from llmrun.cli.chatting.events import NAMES

    given = {key: value for key, value in flags.given().items() if key not in NAMES}
    return _with_system(load_settings({**given, "model": model}), flags, strict=strict)


def _state(store: Store, settings: Settings) -> ConversationState | None:
    from llmrun.cli.chatting.context import ConversationState

    return ConversationState(store.folder, settings.state_bytes) if settings.save_state else None


def _new(store: Store, settings: Settings) -> ConversationRecord:
    from llmrun.cli.answers.answering import lasting_name
    from llmrun.cli.chatting.conversation import new_conversation
    from llmrun.cli.chatting.saying import ConversationRecord

    conversation = new_conversation(lasting_name(settings))
    conversation.system = settings.system
    return ConversationRecord(store, conversation)


def _is_model(text: str, store: Store) -> bool:
    """Return whether the value of --continue is a model. An invalid conversation name counts as a model."""
    from llmrun.cli.chatting.store import checked_name, reporting_file_errors

    with reporting_file_errors("--continue"):
        if store.exactly(text) is not None:
            return False
    try:
        checked_name(text)
    except UsageError:
        return True
    return names_a_model(text)


def _earlier(store: Store, name: str) -> ConversationRecord:
    from llmrun.cli.chatting.actions import summary
    from llmrun.cli.chatting.saying import resume_conversation
    from llmrun.cli.chatting.store import reporting_file_errors

    with reporting_file_errors("--continue"):
        path = store.latest() if name == LAST else store.find(name, "--continue")
        if path is None:
            raise LlmrunError("--continue: there are no conversations yet", hint="llmrun chat starts one")
        record, found = resume_conversation(store, path)
    out.note(f"continuing {summary(found)}")
    return record


def _for_opening(settings: Settings, conversation: Conversation) -> Settings:
    chosen = {key: value for key, value in conversation.preferences.items() if key in RULES}
    return with_values(with_model(settings, conversation.model), chosen)


def _talk(
    models: ModelInUse,
    store: Store,
    record: ConversationRecord,
    settings_for: Callable[[str], Settings],
    prompting: Prompting,
    keyboard: QuietKeyboard | None,
    images: Sequence[GivenImage],
) -> int:
    from llmrun.cli.chatting.archive import last_turn
    from llmrun.cli.chatting.commands import completions, run_command
    from llmrun.cli.chatting.draft_images import DraftImages
    from llmrun.cli.chatting.plain import answer_view
    from llmrun.cli.chatting.session import Chat
    from llmrun.cli.chatting.signals import Signals

    draft_images = DraftImages()
    with (
        closing(_turns(lambda before: completions(session, before), keyboard, draft_images)) as turns,
        Signals(models.cancel, turns.restore) as signals,
    ):
        session = Chat(
            models,
            store=store,
            record=record,
            settings_for=settings_for,
            prompting=prompting,
            turns=turns,
            view=answer_view(),
            signals=signals,
            run_command=run_command,
            images=draft_images,
        )
        if turns.interactive:
            out.fields([*_introduction(models.opened.title, models.opened.engine.info), "/help lists the commands"])
            for row in last_turn(record.conversation):
                out.fields([row])
        session.add_images(images)
        try:
            return session.run()
        finally:
            session.record.close()  # /load may have replaced the record


def _declared_tools(file: Path | None, conversation: Conversation) -> ToolsFile | None:
    """Read the tools file before the model loads, so that mistakes are reported early. Raises UsageError."""
    if file is None:
        return None
    from llmrun.cli.chatting.events import chosen_format
    from llmrun.engine.tools.tools_file import read_tools_file

    if chosen_format(conversation.preferences) is not None:
        raise UsageError("--tools: cannot be combined with an answer format such as --json-schema")
    return read_tools_file(file)


@contextmanager
def _opened_tools(
    declared: ToolsFile | None, models: ModelInUse, conversation: Conversation
) -> Iterator[Toolbox | None]:
    """Start the tool servers, or yield None if there are no tools. Raises UsageError if the model cannot use tools."""
    from llmrun.cli.chatting.context import check_past_calls, check_tools, longest_result

    opened = models.opened
    if declared is None:
        check_past_calls(opened.engine, opened.name, conversation)
        yield None
        return
    check_tools(opened.engine, opened.name)
    from llmrun.engine.constraint.process import problem_with
    from llmrun.engine.tools.tool import Limits
    from llmrun.engine.tools.toolbox import Toolbox

    limits = Limits(result=longest_result(opened.engine))
    with Toolbox.open(declared, validate=problem_with, note=out.note, progress=out.progress, limits=limits) as toolbox:
        out.clear_progress()
        yield toolbox


def _introduction(name: str, info: ModelInfo) -> list[str]:
    if info.backend == "remote":
        return [f"{name} @ {info.device}"]
    return [name, f"context {info.context_size:,} tokens"]


@contextmanager
def _keyboard() -> Iterator[QuietKeyboard | None]:
    """Buffer keys typed while the model loads, for the first prompt. Yields None if there is no line editing."""
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


def _turns(completions: Completions, keyboard: QuietKeyboard | None, images: DraftImages) -> Turns:
    if keyboard is not None:
        from llmrun.cli.chatting.keyboard import TerminalTurns

        return TerminalTurns(completions, keyboard, images)
    from llmrun.cli.chatting.plain import PlainTurns

    return PlainTurns(sys.stdin.buffer, interactive=is_terminal(sys.stdin))
