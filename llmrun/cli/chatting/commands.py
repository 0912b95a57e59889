"""The lines that begin with a slash: one table for dispatch, /help and completion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.cli.chatting import actions
from llmrun.cli.chatting.screen import Completion
from llmrun.cli.console.columns import beside
from llmrun.cli.console.terminal import room
from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.cli.chatting.session import Chat


@dataclass(frozen=True, slots=True)
class Command:
    """`run` gets what follows the name, without the blanks around it. `choices` are words that may follow, each with
    what it is."""

    name: str
    arguments: str
    about: str
    run: Callable[[Chat, str], None]
    aliases: tuple[str, ...] = ()
    choices: Callable[[Chat], Iterable[tuple[str, str]]] = lambda chat: ()

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".rstrip()


def _help(chat: Chat, argument: str) -> None:
    wanted = [command_for(argument.removeprefix("/"))] if argument else COMMANDS
    widest = max(len(command.usage) for command in wanted)
    lines = [(f"{command.usage:<{widest}}  ", command.about) for command in wanted]
    shown = lines if argument else [*lines, *_HINTS]
    chat.reply(line for label, text in shown for line in beside(label, text, room(sys.stderr)))


def _command_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [(command.name, command.about) for command in COMMANDS]


COMMANDS: tuple[Command, ...] = (
    Command("help", "[COMMAND]", "this list", _help, ("?",), _command_choices),
    Command("system", "[TEXT]", "show the system prompt, or set it; `default` takes yours back", actions.system),
    Command(
        "set",
        "[NAME VALUE]",
        "show the settings of this conversation, or set one; `default` takes it back",
        actions.set_preference,
        choices=actions.preference_choices,
    ),
    Command(
        "think",
        "[on|off]",
        "let the model think before it answers, or not; `default` takes it back",
        actions.think,
        choices=actions.think_choices,
    ),
    Command("nothink", "", "answer at once: as /think off", actions.answer_at_once),
    Command(
        "show",
        "[WHAT]",
        "what is going on: model, template, system, settings or conversation",
        actions.show,
        choices=actions.show_choices,
    ),
    Command("clear", "", "begin a new conversation; this one stays saved", actions.clear),
    Command("undo", "", "take back the last question and its answer", actions.undo),
    Command("regen", "", "answer the last question again, with another seed", actions.regenerate),
    Command("save", "[NAME]", "keep a copy by name; every conversation is saved as it goes", actions.save),
    Command(
        "load", "[NAME]", "list the saved conversations, or go on with one", actions.load, (), actions.load_choices
    ),
    Command("search", "WORDS", "find words in this conversation and in earlier ones", actions.search),
    Command("stats", "", "tokens, times and speeds since the start", actions.stats),
    Command("exit", "", "end the chat; so does the end of input", actions.leave, ("bye", "quit")),
)
_HINTS = (
    ('"""  ', "begins and ends a text of several lines"),
    ("//   ", "begins a question that begins with a slash (a blank before it does, too)"),
)


def command_for(name: str) -> Command:
    """The command by one of its names. Raises UsageError with the nearest one."""
    for command in COMMANDS:
        if name == command.name or name in command.aliases:
            return command
    import difflib

    names = [known for command in COMMANDS for known in (command.name, *command.aliases)]
    near = difflib.get_close_matches(name, names, n=1)
    first = f"did you mean /{near[0]}?" if near else "/help lists the commands."
    raise UsageError(
        f"/{name}: no such command, and not sent to the model",
        hint=f"{first} A question that begins with a slash is typed with two: //",
    )


def completions(chat: Chat, before: str) -> Sequence[Completion]:
    """How a line could go on whose part before the cursor is `before`."""
    if not before.startswith("/") or before.startswith("//") or "\n" in before:
        return []
    name, blank, argument = before[1:].partition(" ")
    if not blank:
        return [
            Completion(f"/{command.name}{' ' if command.arguments else ''}", len(before), command.about)
            for command in COMMANDS
            if command.name.startswith(name)
        ]
    known = [command for command in COMMANDS if name == command.name or name in command.aliases]
    return [
        Completion(choice, len(argument), about)
        for command in known
        for choice, about in command.choices(chat)
        if choice.startswith(argument)
    ]
