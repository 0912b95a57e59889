"""Prompt templates, which are files in the folder `templates` next to config.toml.

A template has a prompt and a system prompt with variables, and may have settings:

    prompt = "Translate into $language: $input"
    system = "You are a careful translator."
    model = "qwen3:4b"
    temperature = 0.2

    [defaults]
    language = "English"

Variables have the syntax of Python's `string.Template`, which is `$name` or `${name}`, and `$$` for a dollar sign.
`$input` is the user's prompt. Variables inside values are not expanded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.base.folders import config_file, read_user_file
from llmrun.cli.arguments.flags import AnswerFlags
from llmrun.cli.arguments.parsing import checked_text
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import RULES

INPUT = "input"  # the variable for the user's prompt
SETTINGS = ("model", *SAMPLING, "max_tokens", "seed", "think", "think_budget", "hide_thinking")
KEYS = ("prompt", "system", "defaults", *SETTINGS)

_TEXTS = ("prompt", "system")
_NAME = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The contents of a template file. An empty template has no name and changes nothing.

    prompt    None means `$input`
    system    None means that the template sets no system prompt
    settings  validated values, by their names in SETTINGS
    defaults  default values of variables
    """

    name: str = ""
    prompt: str | None = None
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> list[str]:
        """The names of the variables, except `input`, in order of appearance."""
        return [name for name in _names(self.prompt, self.system) if name != INPUT]

    @property
    def needs_input(self) -> bool:
        """True if the template needs a prompt from the user."""
        return self.prompt is None or INPUT in _names(self.prompt, self.system)

    def applied(self, flags: AnswerFlags) -> AnswerFlags:
        """Return the flags, with the template's settings for those that the user did not give."""
        values = dict(self.settings)
        if flags.think is not None or flags.think_budget is not None:  # these two settings depend on each other
            values.pop("think", None)
            values.pop("think_budget", None)
        given = flags.given()
        sampling = {name: value for name, value in values.items() if name in SAMPLING}
        others = {name: value for name, value in values.items() if name not in SAMPLING and name not in given}
        return replace(flags, **others, sampling={**sampling, **flags.sampling})

    def check_params(self, params: Mapping[str, str]) -> None:
        """Raise UsageError if `params` has a value for a variable that is not in the template."""
        for name in params:
            if name == INPUT:
                raise UsageError("--param: input: this variable is the prompt itself", hint="give it as the prompt")
            if name not in self.variables:
                raise UsageError(
                    f"--param: {name}: template {self.name} has no such variable", hint=_meant(name, self.variables)
                )

    def check_complete(self, params: Mapping[str, str]) -> None:
        """Raise UsageError if a variable has no value. The message lists all such variables."""
        missing = [name for name in self.variables if name not in params and name not in self.defaults]
        if missing:
            raise UsageError(
                f"template {self.name}: no value for {', '.join(f'${name}' for name in missing)}",
                hint=" ".join(f"-P {name}=..." for name in missing),
            )

    def filled(self, asked: str, params: Mapping[str, str]) -> tuple[str, str | None]:
        """Return the prompt and the system prompt with their variables replaced. `params` must be complete.

        If neither of them contains `$input`, `asked` is appended to the prompt.
        """
        values = {**self.defaults, **params, INPUT: asked}
        system = None if self.system is None else Template(self.system).substitute(values)
        if self.prompt is None:
            return asked, system
        prompt = Template(self.prompt).substitute(values)
        return (f"{prompt}\n\n{asked}" if asked and not self.needs_input else prompt), system

    def filled_system(self, params: Mapping[str, str]) -> str | None:
        """Return the system prompt for a new chat. Raises UsageError if it contains `$input`."""
        if INPUT in _names(self.system):
            raise UsageError(f"template {self.name}: system: $input cannot be used in a chat")
        return self.filled("", params)[1]


def read_template(path: Path, name: str) -> PromptTemplate:
    """Read a template file. Raises UsageError with a one-line message if it is invalid."""
    return parse_template(read_user_file(path, "template"), path, name)


def parse_template(data: bytes, path: Path, name: str) -> PromptTemplate:
    """Parse the bytes of a template file. Raises UsageError."""
    import tomllib  # imported here, because it takes 5 ms and most runs do not need it

    try:
        table = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError means invalid TOML or UTF-8, or too many digits
        raise UsageError(f"template: {path}: not valid TOML: {error}") from None
    for key in table:
        if key not in KEYS:
            raise UsageError(f"template: {path}: {key}: no such key", hint=_meant(key, KEYS))
    if not table.keys() & {*_TEXTS, *SETTINGS}:
        raise UsageError(
            f"template: {path}: empty", hint='a template needs a prompt, as in prompt = "Summarize: $input"'
        )
    texts = {key: _checked_text(table[key], key, path) for key in _TEXTS if key in table}
    settings = {key: _checked_setting(table[key], key, path) for key in SETTINGS if key in table}
    if settings.get("think") and settings.get("think_budget") == 0:
        raise UsageError(f"template: {path}: think: contradicts think_budget = 0, which turns thinking off")
    defaults = _checked_defaults(table.get("defaults", {}), _names(*texts.values()), path)
    return PromptTemplate(name, texts.get("prompt"), texts.get("system"), settings, defaults)


def parse_params(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `["language=French"]` into `{"language": "French"}`. Raises UsageError.

    If a name is repeated, the last value wins.
    """
    params = {}
    for pair in pairs:
        name, equals, value = checked_text(pair, "--param").partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UsageError(f"--param: {pair!r} is not NAME=VALUE, as in language=French")
        params[name] = value
    return params


def _checked_text(value: object, key: str, path: Path) -> str:
    if not isinstance(value, str):
        raise UsageError(f"template: {path}: {key}: {value!r:.60} is not text")
    if key == "prompt" and not value.strip():
        raise UsageError(f"template: {path}: {key}: empty", hint="leave it out to use $input as the prompt")
    for match in Template.pattern.finditer(value):
        if match["invalid"] is not None:
            line = value.count("\n", 0, match.start()) + 1
            begun = value[match.start() : match.start() + 12].partition("\n")[0]
            raise UsageError(
                f"template: {path}: {key}: line {line}: {begun!r} is not a variable",
                hint="write $$ for a dollar sign",
            )
    return value


def _checked_setting(value: object, key: str, path: Path) -> object:
    try:
        return RULES[key].check(value)
    except ValueError:
        raise UsageError(
            f"template: {path}: {key}: {value!r:.60} is not {RULES[key].words}", hint=RULES[key].advice(value)
        ) from None


def _checked_defaults(table: object, known: Sequence[str], path: Path) -> dict[str, str]:
    if not isinstance(table, dict):
        raise UsageError(f'template: {path}: defaults: not a table, as in [defaults] and language = "English"')
    for name, value in table.items():
        if name == INPUT:
            raise UsageError(f"template: {path}: defaults: $input is the prompt and cannot have a default")
        if name not in known:
            names = [one for one in known if one != INPUT]
            raise UsageError(f"template: {path}: defaults: ${name} is not used in the texts", hint=_meant(name, names))
        if type(value) not in (str, int, float):
            raise UsageError(f"template: {path}: defaults: {name}: {value!r:.60} is not text or a number")
    return {name: str(value) for name, value in table.items()}


def _names(*texts: str | None) -> list[str]:
    """Return the distinct variables in validated templates, in order of appearance."""
    matches = [match for text in texts if text for match in Template.pattern.finditer(text)]
    return list(dict.fromkeys(match["named"] or match["braced"] for match in matches if not match["escaped"]))


def _meant(name: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"


ENDING = ".toml"
_TEMPLATE_NAME = re.compile(r"\w[\w .-]{0,63}")


def templates_folder() -> Path:
    """Return the folder of the user's templates. The folder might not exist."""
    return config_file().with_name("templates")


def template_names() -> list[str]:
    """Return the names of the user's templates, sorted. Raises UsageError if the folder cannot be read."""
    folder = templates_folder()
    try:
        return sorted(
            path.stem for path in folder.iterdir() if path.suffix == ENDING and _TEMPLATE_NAME.fullmatch(path.stem)
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"templates: {folder}: {error.strerror or error}") from error


def template_path(name: str) -> Path:
    """Return the path of a template's file. The file might not exist.

    A name that contains a slash or ends with .toml is a path. Any other name refers to a file in the user's templates
    folder. Raises UsageError if the name is invalid.
    """
    if name.endswith(ENDING) or "/" in name or os.sep in name:
        return Path(name)
    if not _TEMPLATE_NAME.fullmatch(name):
        raise UsageError(f"template: {name!r:.80} is not a valid name", hint="use letters, digits, spaces and . _ -")
    return templates_folder() / f"{name}{ENDING}"


def load_template(name: str) -> PromptTemplate:
    """Read a template by name or path. If there is none, raise UsageError and suggest a similar name."""
    path = template_path(name)
    if not os.path.lexists(path) and path.parent == templates_folder():
        raise UsageError(f"template: {name}: no such template", hint=_nearest(path.stem))
    return read_template(path, path.stem)


def chosen_template(name: str | None, pairs: Sequence[str]) -> tuple[PromptTemplate, dict[str, str]]:
    """Return the template that -T selects, or an empty template, and the values of -P. Raises UsageError."""
    params = parse_params(pairs)
    if name is None:
        if params:
            raise UsageError("--param: requires a template", hint="add -T NAME; llmrun templates lists the names")
        return PromptTemplate(), params
    template = load_template(name)
    template.check_params(params)
    return template, params


def _nearest(name: str) -> str:
    import difflib

    names = template_names()
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return "llmrun templates lists your templates" if names else f"llmrun templates edit {name} creates it"
