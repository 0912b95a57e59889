"""The registry of commands. Each file in `commands/` defines the command with the same name.

A command's module is imported only when the command runs. `llmrun list` does not have to import `bench`, and `--help`
imports no commands at all, which saves 30 of 160 ms. The help texts are therefore read from the files' source code,
which takes 1 ms in total. docs/adding-a-command.md describes the format of these files.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperOption

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.usage import DEBUG_HELP, GENERAL, NO_COMMAND, CommandGroup, SingleCommand

if TYPE_CHECKING:
    from llmrun.cli.arguments.help_page import Section

_FOLDER = Path(__file__).with_name("commands")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_LISTING = re.compile(r"^LISTING = (\{.*?\})$", re.MULTILINE | re.DOTALL)
_REMOVED = {"templates": "prompt templates are presets now: `llmrun list` shows them, and -m NAME uses one"}
# Commands of Ollama and llm that have other names here, with hints for their users.
_ELSEWHERE = {
    "alias": "`llmrun preset add NAME -m MODEL` gives a model another name",
    "cp": "`llmrun preset add NAME -m MODEL` gives a model another name",
    "create": "`llmrun import FILE NAME` names a model file, and `llmrun preset add` names a model with settings",
    "models": "`llmrun list` lists the models on this machine, and `llmrun search` those to download",
    "perplexity": "`llmrun eval MODEL --text FILE` measures the perplexity of a model",
    "uninstall": "`pip uninstall llmrun-gguf`; `llmrun doctor --paths` lists what llmrun has stored on this machine",
    "version": "`llmrun --version`",
}
_RARE = 100  # commands with this place or a later one have no line of their own in `llmrun --help`
_LAST = 1000  # the default place, for commands that do not set one


class Page(NamedTuple):
    """The help page of a command, as written in its file.

    help      the paragraphs; the first sentence is the summary in `llmrun --help`
    examples  the examples, one per line
    heading   the heading in `llmrun --help` under which the command is listed
    place     the sort key of the command in `llmrun --help`, in ascending order; headings follow their first command
    aliases   other names of the command
    extra     the hint to show for too many arguments and for an unknown subcommand, or ""
    unknown   the hint to show for an unknown option, or ""
    """

    help: str
    examples: str
    heading: str
    place: int
    aliases: tuple[str, ...]
    extra: str
    unknown: str

    @property
    def summary(self) -> str:
        first, period, _ = " ".join(self.help.partition("\n\n")[0].split()).partition(". ")
        return first + period.rstrip()


class Commands(CommandGroup):
    """The group of all commands, which imports a command only when the command is needed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: dict[str, Any] = dict.fromkeys(command_names())
        self.commands = names  # Typer's "did you mean" reads the names from this attribute

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name in _REMOVED:
            raise UsageError(f"{cmd_name}: no longer exists", hint=_REMOVED[cmd_name])
        if cmd_name in _ELSEWHERE:
            raise UsageError(f"no such command '{cmd_name}'", hint=_ELSEWHERE[cmd_name])
        name = cmd_name if cmd_name in self.commands else aliases().get(cmd_name)
        if name is None:
            from llmrun.cli.arguments.options import names_a_model  # `--help` needs no settings

            if " " in cmd_name or names_a_model(cmd_name):
                raise UsageError(f"no such command '{cmd_name}'", hint=NO_COMMAND)
        return name and load(name)

    def names_by_heading(self) -> dict[str, list[str]]:
        """Return the names of all commands in the order of their places, under their headings."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.commands, key=lambda name: page_of(name).place):
            found.setdefault(page_of(name).heading, []).append(name)
        return found

    def listed(self, *, everything: bool) -> list[Section]:
        from llmrun.cli.arguments.help_page import Section

        found, rare = [], []
        for heading, names in self.names_by_heading().items():
            rows = []
            for name in names:
                page = page_of(name)
                if everything or page.place < _RARE:
                    rows.append((", ".join((name, *page.aliases)), page.summary))
                else:
                    rare.append(name)
            found.append(Section(heading, rows))
        found.append(Section("More commands", [(", ".join(sorted(rare)), "")] if rare else []))
        return [section for section in found if section.rows]

    def where_the_rest_is(self, ctx: Any, hidden: int) -> str:
        del ctx, hidden
        return "For more, see `llmrun COMMAND --help` and `llmrun --help-all`."


def command_names() -> list[str]:
    """Return the names of all commands in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("[!_]*.py"))


def aliases() -> dict[str, str]:
    """Return a mapping from aliases to command names."""
    return {alias: name for name in command_names() for alias in page_of(name).aliases}


@cache
def page_of(name: str) -> Page:
    """Read a command's help page from its file without importing it."""
    source = (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
    docstring = _DOCSTRING.match(source)
    assert docstring is not None, f"commands/{name}.py has no docstring"
    listing = _LISTING.search(source)
    values = ast.literal_eval(listing[1]) if listing else {}
    text, _, examples = docstring[1].partition("\nExamples:\n")
    return Page(
        text.strip(),
        inspect.cleandoc(examples),
        values.get("heading", "Other"),
        values.get("place", _LAST),
        values.get("aliases", ()),
        values.get("extra", ""),
        values.get("unknown", ""),
    )


def load(name: str) -> Any:
    """Import a command and return it, ready to be invoked."""
    made = import_module(f"llmrun.cli.commands.{name}").command
    if not isinstance(made, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(cls=SingleCommand)(made)
        made = alone
    command: Any = typer.main.get_command(made)
    for each in (command, *getattr(command, "commands", {}).values()):
        _accept_debug(each)
    page = page_of(name)
    command.name, command.help, command.epilog = name, page.help, page.examples
    command.extra_hint, command.unknown_hint = page.extra, page.unknown
    if page.aliases:
        also = ", ".join(f"llmrun {alias}" for alias in page.aliases)
        command.help += f"\n\nAlso: {also}."
    return command


def _accept_debug(command: Any) -> None:
    """Add --debug, which `main` reads from the arguments, unless the command declares its own --debug."""
    if all(parameter.name != "debug" for parameter in command.params):
        command.params.append(
            TyperOption(
                param_decls=["--debug"],
                is_flag=True,
                default=False,
                expose_value=False,
                help=DEBUG_HELP,
                rich_help_panel=GENERAL,
            )
        )
