"""The flags and chat settings that give an answer a format: JSON, a regular expression, a grammar or a choice.

An answer can have only one format. Flags and settings have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompt import checked_text, read_text

if TYPE_CHECKING:
    from llmrun.engine.constraint.base import ResponseFormat

JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICE = NAMES = ("json_schema", "json_object", "regex", "grammar", "choice")
ON: Final = "on"  # the value of json_object
_FILES = (JSON_SCHEMA, GRAMMAR)  # formats whose value may be the name of a file
_TEXT_BEGINS = {
    JSON_SCHEMA: ("{", "[", '"', "true", "false"),
    GRAMMAR: (),
}  # otherwise, the value is the name of a file


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def format_text(name: str, value: str, flag: str) -> str:
    """Return the text of a format, which is read from a file if the value names one. Raises UsageError.

    flag  the flag or setting, for error messages
    """
    value = checked_text(value, flag)
    if not value.strip():
        raise UsageError(f"{flag}: the text must not be empty")
    if name in _FILES and not (value.lstrip().startswith(_TEXT_BEGINS[name]) and _TEXT_BEGINS[name]):
        return read_text(Path(value), flag)
    return value


def one_format(values: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Return the name and the text of the only format that is given, or None. Raises UsageError if there are several.

    values  what was given for each name in NAMES
    """
    given = [(name, value) for name, value in values.items() if value is not None]
    if not given:
        return None
    flags = [flag_of(name) for name, _ in given]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(flags)}: an answer can have only one format", hint="use one of them")
    name, value = given[0]
    return name, format_text(name, value, flags[0])


def response_format(name: str, text: str, origin: str) -> ResponseFormat:
    """Return the format with this name and text.

    origin  the flag or setting, for error messages
    """
    from llmrun.engine.constraint.base import FormatKind, ResponseFormat

    choices = tuple(choice.strip() for choice in text.split(",")) if name == CHOICE else ()
    return ResponseFormat(FormatKind(name), text, choices, origin)


def checked_format(name: str, text: str, origin: str) -> ResponseFormat:
    """Return the format with this name and text. Raises UsageError for mistakes that can be found without a model.

    A model may have to be downloaded, so most mistakes should be reported before that.
    """
    from llmrun.engine.constraint.grammars import check_format

    wanted = response_format(name, text, origin)
    check_format(wanted)
    return wanted
