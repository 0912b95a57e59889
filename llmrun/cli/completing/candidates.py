"""Finds completion candidates for the last word of a command line.

The candidates are derived from the command definitions, so new commands and flags require no changes in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmrun.cli.arguments.options import FILES
from llmrun.cli.registry import Commands, aliases, page_of

_HELP = "help"  # in `llmrun help bench compare`, the words after `help` are completed as if `help` were missing


class Candidate(NamedTuple):
    """A complete word and its short description, which may be empty."""

    word: str
    description: str = ""


@dataclass(slots=True)
class _Line:
    """The parsed words before the word to complete.

    context    the context of the innermost command
    arguments  the number of positional arguments before the word
    flag       the flag whose value is the next word, or None
    seen       the names of all flags before the word
    ended      True if `--` has ended the flags
    """

    context: Any
    arguments: int = 0
    flag: Any = None
    seen: tuple[str, ...] = ()
    ended: bool = False

    @property
    def command(self) -> Any:
        return self.context.command

    def take(self, word: str) -> bool:
        """Parse the next word. Return False for an unknown command."""
        if self.flag is not None:
            self.flag = None
        elif word == "--" and not self.ended:
            self.ended = True
        elif word.startswith("-") and word != "-" and not self.ended:
            name, equals, _ = word.partition("=")
            self.seen += (name,)
            flag = _flags(self.context).get(name)
            self.flag = flag if flag is not None and not equals and _takes_value(flag) else None
        elif _is_group(self.command):
            if isinstance(self.command, Commands) and word == _HELP:
                return True
            below = self.command.get_command(self.context, word) if not self.arguments else None
            if below is not None:
                self.context, self.seen = _context(below, word, self.context), ()
            elif _argument(self) is None:
                return False
            else:
                self.arguments += 1
        else:
            self.arguments += 1
        return True


def candidates(top: Any, words: Sequence[str]) -> tuple[list[Candidate], bool]:
    """Return the candidates for the last word, and True if the shell should also complete file names.

    top    the `llmrun` command
    words  the words after `llmrun`, up to the cursor; the last word may be empty
    """
    *before, current = words or [""]
    line = _Line(_context(top, "llmrun", None))
    if not all(line.take(word) for word in before):
        return [], False
    prefix, found = _possible(line, current)
    matching = [each for each in found if each.word.startswith(current[len(prefix) :]) and each.word != FILES]
    files = any(each.word == FILES for each in found)
    # Names that contain unprintable characters are left out, because names come from folders and from other programs.
    safe = [each for each in matching if f"{each.word}{each.description}".isprintable()]
    return [each._replace(word=prefix + each.word) for each in dict.fromkeys(safe)], files and not safe


def _possible(line: _Line, current: str) -> tuple[str, list[Candidate]]:
    """Return the part of the current word that is already complete, and the candidates for the rest."""
    name, equals, value = current.partition("=")
    if line.flag is not None:
        return _kept(current), _values(line.context, line.flag)
    if current.startswith("-") and not line.ended:
        if not equals:
            return "", list(_flag_names(line))
        flag = _flags(line.context).get(name)
        known = flag is not None and _takes_value(flag)
        return f"{name}={_kept(value)}", _values(line.context, flag) if known else []
    if _is_group(line.command) and not line.arguments:
        return "", [*_commands(line, current), *_values(line.context, _argument(line))]
    return _kept(current), _values(line.context, _argument(line))


def _kept(value: str) -> str:
    """Return the complete part of a comma-separated value, such as `cpu,` for `cpu,lla`."""
    return value[: value.rfind(",") + 1]


def _commands(line: _Line, current: str) -> Iterator[Candidate]:
    """Yield the subcommands. Yield aliases only if no command name begins with the current word."""
    if not isinstance(line.command, Commands):
        for name, command in line.command.commands.items():
            yield Candidate(name, command.get_short_help_str(200))
        return
    named = [name for name in line.command.commands if name.startswith(current)]
    for name in named or (alias for alias in aliases() if alias.startswith(current)):
        yield Candidate(name, page_of(aliases().get(name, name)).summary)


def _flag_names(line: _Line) -> Iterator[Candidate]:
    """Yield all names of the flags that may still be added."""
    for flag in dict.fromkeys(_flags(line.context).values()):
        names = (*flag.opts, *flag.secondary_opts)
        if not flag.hidden and (flag.multiple or not set(names) & set(line.seen)):
            yield from (Candidate(name, flag.help or "") for name in names)


def _values(context: Any, parameter: Any) -> list[Candidate]:
    """Return the possible values of a flag or an argument, or [] if any text is accepted."""
    if parameter is None:
        return []
    if parameter.type.name == "path":
        return [Candidate(FILES)]
    return [Candidate(item.value, item.help or "") for item in parameter.shell_complete(context, "")]


def _argument(line: _Line) -> Any:
    """Return the positional argument for the next word, or None if there are no more arguments."""
    taken = 0
    for parameter in line.command.params:
        if parameter.param_type_name == "argument":
            taken += 1
            if parameter.nargs == -1 or taken > line.arguments:
                return parameter
    return None


def _flags(context: Any) -> dict[str, Any]:
    parameters = [each for each in context.command.get_params(context) if each.param_type_name == "option"]
    return {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}


def _takes_value(flag: Any) -> bool:
    return not flag.is_flag and not flag.count


def _is_group(command: Any) -> bool:
    return hasattr(command, "get_command")


def _context(command: Any, name: str, parent: Any) -> Any:
    return command.make_context(name, [], parent=parent, resilient_parsing=True)
