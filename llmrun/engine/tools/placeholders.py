"""Fills the placeholders of a command with the arguments of a call.

{city} stands for the argument `city`, and {{city}} for the text {city}. Other braces are kept as they are. A value
always stays within one argument of the program, whatever it contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLACEHOLDER = re.compile(r"\{(\{[A-Za-z_]\w*\})\}|\{([A-Za-z_]\w*)\}", re.ASCII)
_NUMBER = re.compile(r"-\d+(\.\d+)?", re.ASCII)
_NO_ARGUMENT = re.compile("[\0\ud800-\udfff]")


def placeholders(argument: str) -> list[str]:
    """Return the names of the placeholders in an argument of a command."""
    return [match[2] for match in _PLACEHOLDER.finditer(argument) if match[2]]


def filled(command: Sequence[str], schema: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the command with its placeholders replaced. Raises ValueError if a value cannot be used.

    schema  the JSON schema of the values; its properties may have defaults
    """
    defaults = {name: rule["default"] for name, rule in schema["properties"].items() if "default" in rule}
    texts = {name: _text(value) for name, value in {**defaults, **values}.items()}
    arguments = list(command[:1])
    for argument in command[1:]:
        names = placeholders(argument)
        for name in names:
            if name not in texts:
                raise ValueError(f"the argument {name!r} is missing")
            if _NO_ARGUMENT.search(texts[name]):
                raise ValueError(f"the argument {name!r} contains a NUL character or a lone surrogate")
        text = _PLACEHOLDER.sub(lambda match: match[1] or texts[match[2]], argument)
        # Otherwise a model could pass any option, such as --output=FILE. After "--", programs expect no options.
        may_be_option = not argument.startswith("-") and "--" not in command[: len(arguments)]
        if names and may_be_option and text.startswith("-") and not _NUMBER.fullmatch(text):
            raise ValueError(f"the argument {names[0]!r} must not begin with '-'")
        arguments.append(text)
    return arguments


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
