"""Subclasses of Typer's command classes that use llmrun's error format and llmrun's help pages, and general options.

Every command line imports this file, and most of them need no settings, so it imports no settings.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import TyperException
from typer.core import TyperCommand, TyperGroup, TyperOption

from llmrun.base.errors import UsageError
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.arguments.help_page import Section

GENERAL = "General"  # the last heading of a help page, for options that most commands have
_EXTRA = re.compile(r"got unexpected extra argument\(s\) \((.*)\)", re.DOTALL)
NO_COMMAND = '`llmrun chat MODEL` starts a chat, and `llmrun generate -m MODEL "text"` answers one prompt'
_WHOLE = 1000  # characters; summaries are shorter, so they are not cut off
_MOST_MEANT = 3  # a hint suggests at most this many options
_SLACK = 0.1  # the largest difference in similarity between the best match and a suggested option


def under(heading: str) -> Callable[..., Any]:
    """Return `typer.Option` for options that `--help-all` lists under a heading. Long pages of `--help` omit them."""
    return functools.partial(typer.Option, rich_help_panel=heading)


general_option = under(GENERAL)

DEBUG_HELP = "Show a traceback if the command fails."
Debug = Annotated[bool, general_option("--debug", help=DEBUG_HELP)]


def _print_whole_page(context: Any, option: Any, wanted: bool) -> None:
    del option
    if wanted and not context.resilient_parsing:
        from llmrun.cli.arguments.help_page import whole_page

        out.answer(whole_page(context))
        out.end_answer()
        context.exit()


_HELP_ALL = TyperOption(
    param_decls=["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_whole_page,
    help="Show all options and exit.",
    rich_help_panel=GENERAL,
)


class _InOurWords:
    """A mixin with the methods that SingleCommand and CommandGroup override. `epilog` contains one example per line.

    extra_hint    the hint to show for too many arguments and for an unknown subcommand, or "" for the usual hint
    unknown_hint  the same for an unknown option
    """

    epilog: str | None
    extra_hint = ""
    unknown_hint = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Convert errors here, because the parser's errors do not name the command."""
        try:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]  # Typer's class is next in the MRO
        except TyperException as error:
            raise usage_error(error, ctx) from error
        return parsed

    def get_params(self, ctx: Any) -> list[Any]:
        *params, help_option = super().get_params(ctx)  # type: ignore[misc]
        help_option.help, help_option.rich_help_panel = "Show help and exit.", GENERAL
        return [*params, help_option, _HELP_ALL]

    def get_help(self, ctx: Any) -> str:
        from llmrun.cli.arguments.help_page import help_page

        return help_page(ctx)

    def listed(self, *, everything: bool) -> list[Section]:
        """Return the sections with the commands below this command. Without `everything`, rare commands are names."""
        del everything
        return []

    def where_the_rest_is(self, ctx: Any, hidden: int) -> str:
        """Return the last line of a page that leaves out `hidden` options."""
        return f"`{ctx.command_path} --help-all` shows the other {hidden} options."


class SingleCommand(_InOurWords, TyperCommand):
    """A command without subcommands.

    If an option's metavar is in brackets, its value is optional and defaults to "". The next word is taken as the value
    unless it begins with a dash.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        optional = {
            name
            for each in self.params
            if each.param_type_name == "option" and (each.metavar or "").startswith("[")
            for name in each.opts
        }
        return super().parse_args(ctx, _with_values(args, optional) if optional else args)


def _with_values(args: list[str], optional: Collection[str]) -> list[str]:
    """Rewrite each option in `optional` as `--name=VALUE`. VALUE is empty if no value follows."""
    joined: list[str] = []
    rest = iter(enumerate(args))
    for number, word in rest:
        if word == "--":
            return [*joined, *args[number:]]
        if word not in optional:
            joined.append(word)
            continue
        following = args[number + 1 : number + 2]
        has_value = bool(following) and not following[0].startswith("-")
        joined.append(f"{word}={following[0] if has_value else ''}")
        if has_value:
            next(rest)
    return joined


class CommandGroup(_InOurWords, TyperGroup):
    """A command with subcommands."""

    def listed(self, *, everything: bool) -> list[Section]:
        from llmrun.cli.arguments.help_page import Section

        del everything
        rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in self.commands.items()]
        return [Section("Commands", rows)]


class ModelGroup(CommandGroup):
    """A command that takes positional arguments, and whose first argument may be the name of a subcommand instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Options may follow positional arguments, unless a subcommand comes first."""
        with suppress(TyperException):  # super().parse_args raises the same error in our words
            _, rest, _ = self.make_parser(ctx).parse_args(list(args))  # stops before the first argument
            ctx.allow_interspersed_args = not rest or not self._is_command(rest[0])
        return super().parse_args(ctx, args)

    def _is_command(self, word: str) -> bool:
        """Return whether a word is the name of a subcommand, or a misspelled one, so that it gets a suggestion."""
        if word in self.commands or not word.isalpha():
            return word in self.commands
        from difflib import get_close_matches

        return bool(get_close_matches(word, self.commands, cutoff=0.8))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters. Leave out positional arguments for a subcommand's context, and if one comes first."""
        params = super().get_params(ctx)
        if ctx.command is self and ctx.allow_interspersed_args:
            return params
        return [each for each in params if each.param_type_name != "argument"]


def command_group(cls: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """Return a command group without subcommands, configured like every llmrun command."""
    return typer.Typer(
        cls=cls,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def refuse_early_flags(context: typer.Context) -> None:
    """Raise UsageError for a flag (except `--debug`) before the subcommand, because the flag would be ignored."""
    name = context.invoked_subcommand
    group: Any = context.command
    accepted = {flag for each in group.commands[name].params for flag in each.opts}
    for parameter in group.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name != "debug" and source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[-1]
            if flag not in accepted:
                raise UsageError(f"{flag}: does not apply to {name}")
            raise UsageError(f"{flag}: must come after {name}", hint=f"{context.command_path} {name} {flag}")


def usage_error(error: TyperException, context: Any) -> UsageError:
    """Convert one of Typer's usage errors to a UsageError.

    The kind of error is recognized by its attributes, because Typer's error classes are not public.

    context  the command's context, or None for `llmrun` itself
    """
    hint = f"see {context.command_path if context else 'llmrun'} --help"
    sentence = error.message.rstrip(".")
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if parameter is not None:
        name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.human_readable_name
        if sentence:
            sentence = f"{name}: {_in_words(sentence, parameter.type)}"
        else:
            sentence = f"{name.removesuffix('...')} is missing"
            if example := next(iter((context.command.epilog or "").splitlines()), ""):
                hint = f"for example: {example}"
    elif hasattr(error, "possibilities"):
        sentence = f"{option}: no such option"
        if any(" " in word and word.startswith(str(option)) for word in sys.argv[1:]):
            hint = "if this is text, write -- before it"
        elif option in ("-m", "--model", "-p", "--prompt") and context and context.parent is None:
            hint = NO_COMMAND
        elif near := _nearest(str(option), context.command.params if context else ()):
            *others, last = near
            hint = f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
        elif context:
            hint = context.command.unknown_hint or hint
    elif option is not None:
        sentence = f"{option}: " + ("a value is missing" if "requires" in sentence else "takes no value")
    else:
        sentence = sentence[:1].lower() + sentence[1:]
    if extra := _EXTRA.fullmatch(sentence):
        sentence = f"unexpected argument: {extra[1]}"
        hint = context.command.extra_hint or hint
    if sentence.startswith("no such command") and context:
        hint = context.command.extra_hint or hint
    if "Did you mean" in sentence:
        sentence, _, meant = sentence.partition(". Did you mean ")
        hint = f"did you mean {meant}"
    return UsageError(sentence, hint=hint)


def _in_words(sentence: str, wanted: Any) -> str:
    """Rewrite Typer's sentence about an invalid value in plain words if the expected type `wanted` is a number."""
    refused = re.fullmatch(r"(.*) is not (?:a valid|in the range) .*", sentence, re.DOTALL)
    if refused is None or not wanted.name.startswith(("int", "float")):
        return sentence
    low, high = getattr(wanted, "min", None), getattr(wanted, "max", None)
    bounds = {
        (False, False): "",
        (True, False): f" of at least {low}",
        (False, True): f" of at most {high}",
        (True, True): f" from {low} to {high}",
    }[low is not None, high is not None]
    return f"{refused[1]} is not a {'whole ' if wanted.name.startswith('int') else ''}number{bounds}"


def _nearest(option: str, parameters: Any) -> list[str]:
    """Return the options that start with the given text, or else the options with a similar spelling, best match first.

    For an option with several names, only one name is returned. Typer's own suggestions are not used, because they
    include options that merely share some letters, and do not include --max-tokens for --max.
    """
    import difflib

    if not option.startswith("--"):
        return []
    known = [
        [name for name in (*each.opts, *each.secondary_opts) if name.startswith("--")]
        for each in parameters
        if not getattr(each, "hidden", False)
    ]
    begun = [next(name for name in names if name.startswith(option)) for names in known if _begins(option, names)]
    if begun:
        return begun if len(begun) <= _MOST_MEANT else []
    close = difflib.get_close_matches(option, [name for names in known for name in names], n=2, cutoff=0.75)
    return [name for name in close if _similarity(option, name) >= _similarity(option, close[0]) - _SLACK]


def _begins(option: str, names: list[str]) -> bool:
    return any(name.startswith(option) for name in names)


def _similarity(option: str, name: str) -> float:
    import difflib

    return difflib.SequenceMatcher(None, name, option).ratio()
