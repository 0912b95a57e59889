"""The table of slash commands, which is used for dispatch, /help (in groups) and completion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.cli.chatting import actions
from llmrun.cli.chatting.plain import Completion
from llmrun.cli.console.output import beside, out
from llmrun.cli.console.terminal import room

if TYPE_CHECKING:
    from llmrun.cli.chatting.session import Chat


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command.

    run      the function to call with the chat and the argument, which has no surrounding whitespace
    choices  a function that returns the possible arguments, each with its description
    matches  a function that returns the arguments that complete what was typed, instead of `choices`
    """

    name: str
    arguments: str
    about: str
    run: Callable[[Chat, str], None]
    choices: Callable[[Chat], Iterable[tuple[str, str]]] = lambda chat: ()
    matches: Callable[[Chat, str], Iterable[tuple[str, str]]] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """The command's name and arguments, followed by the aliases."""
        return ", ".join([f"/{self.name} {self.arguments}".rstrip(), *(f"/{alias}" for alias in self.aliases)])


def _help(chat: Chat, argument: str) -> None:
    if argument:
        command = command_for(argument.removeprefix("/"))
        out.reply(beside(f"{command.usage}  ", command.about, room(sys.stderr)))
        return
    widest = max(len(command.usage) for command in COMMANDS)
    for group, commands in GROUPS.items():
        out.reply([f"{group}:"])
        for command in commands:
            out.reply(beside(f"  {command.usage:<{widest}}  ", command.about, room(sys.stderr)))
    out.reply(line for label, text in _HINTS for line in beside(label, text, room(sys.stderr)))


def _command_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [(command.name, command.about) for command in COMMANDS]


GROUPS: dict[str, tuple[Command, ...]] = {
    "Conversation": (
        Command("clear", "", "begin a new conversation; this one stays saved", actions.clear),
        Command("undo", "", "remove the last question and its answer", actions.undo),
        Command("save", "[NAME]", "save a named copy; every chat is saved automatically", actions.save),
        Command("load", "[NAME]", "list the saved conversations, or continue one", actions.load, actions.load_choices),
        Command("search", "WORDS", "find words in this conversation and in earlier ones", actions.search),
    ),
    "Answers": (
        Command("retry", "", "answer the last question again, with another seed", actions.retry, aliases=("regen",)),
        Command("image", "FILE", "add an image to the next question", actions.image, matches=actions.image_choices),
        Command("edit", "[TEXT]", "write a question in $EDITOR, starting from the last one", actions.edit),
        Command(
            "copy",
            f"[{actions.CODE}]",
            "copy the last answer, or its last code block",
            actions.copy,
            lambda chat: [(actions.CODE, "")],
        ),
    ),
    "Model and settings": (
        Command(
            "model",
            "[NAME]",
            "show the model, or open another one for this conversation",
            actions.model,
            actions.model_choices,
        ),
        Command("system", "[TEXT]", "show or set the system prompt; `default` resets it", actions.system),
        Command(
            "set",
            "[NAME VALUE]",
            "show or change the settings; `default` resets one",
            actions.set_preference,
            actions.preference_choices,
        ),
        Command(
            "think",
            "[on|off]",
            "turn thinking on or off; `default` resets it",
            actions.think,
            lambda chat: [("on", ""), ("off", ""), (actions.DEFAULT, "")],
        ),
        Command("nothink", "", "turn thinking off, like /think off", actions.answer_at_once),
        Command(
            "tools",
            "[NAME]",
            "list tools; `allow NAME` and `ask NAME` set confirmation",
            actions.tools,
            actions.tool_choices,
        ),
    ),
    "Chat": (
        Command("help", "[COMMAND]", "list the commands, or explain one", _help, _command_choices, aliases=("?",)),
        Command(
            "show",
            "[WHAT]",
            "show model, template, system, settings or conversation",
            actions.show,
            lambda chat: [(name, "") for name in actions.SHOWN],
        ),
        Command(
            "stats",
            "[on|off]",
            "show speeds and times; `on` shows them for every answer",
            actions.stats,
            lambda chat: [("on", ""), ("off", "")],
        ),
        Command("exit", "", "end the chat, like the end of input", actions.leave, aliases=("bye", "quit")),
    ),
}
COMMANDS = tuple(command for group in GROUPS.values() for command in group)
_HINTS = (
    ('"""  ', "begins and ends a message of several lines"),
    ("//   ", "sends a question that begins with a slash (a leading space also works)"),
)


def run_command(chat: Chat, name: str, argument: str) -> None:
    """Run the command with this name or alias. Raises UsageError for an unknown name."""
    command_for(name).run(chat, argument)


def command_for(name: str) -> Command:
    """Return the command with this name or alias. For an unknown name, raise UsageError with a suggestion."""
    by_name = {known: command for command in COMMANDS for known in (command.name, *command.aliases)}
    if name in by_name:
        return by_name[name]
    import difflib

    near = difflib.get_close_matches(name, by_name, n=1)
    first = f"did you mean /{near[0]}?" if near else "/help lists the commands."
    raise UsageError(
        f"/{name:.80}: no such command; nothing was sent to the model",
        hint=f"{first} Type // to send a question that begins with a slash.",
    )


def completions(chat: Chat, before: str) -> Sequence[Completion]:
    """Return the completions for the text before the cursor. Images may precede a command."""
    before = before.removeprefix(chat.images.leading(before))
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
        for choice, about in (command.matches(chat, argument) if command.matches else command.choices(chat))
        if choice.startswith(argument)
    ]
