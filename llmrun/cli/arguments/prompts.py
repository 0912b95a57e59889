"""Fills in the variables of a preset's prompts with values from -P, the preset and the user's prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Template
from typing import Self

from llmrun.base.errors import UsageError, nearest
from llmrun.cli.arguments.parsing import checked_text
from llmrun.options.presets import INPUT, ONLY_INPUT, Preset, variables_in
from llmrun.options.settings import Settings

_NAME = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*", re.ASCII)


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


def check_params(params: Iterable[str], preset: Preset | None) -> None:
    """Raise UsageError for a variable that is not in the preset's prompts."""
    for name in params:
        if preset is None or preset.prompt is None:
            hint = "add -m NAME; llmrun list shows your presets"
            raise UsageError("--param: requires a preset with a prompt", hint=hint)
        if name == INPUT:
            raise UsageError("--param: input: this variable is the prompt itself", hint="give the value as the prompt")
        if name not in preset.params:
            hint = nearest(name, preset.params)
            raise UsageError(f"--param: {name}: preset {preset.name} has no such variable", hint=hint)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Templates for a prompt and a system prompt, with values for their variables. Values are inserted verbatim.

    name  the name of the preset, for error messages
    """

    name: str
    prompt: str
    system: str | None
    values: Mapping[str, str]

    @classmethod
    def of(cls, settings: Settings, params: Mapping[str, str], system: str | None = None) -> Self:
        """Return the prompts of a run.

        params  values that replace the preset's defaults
        system  the system prompt that the user gave for this run, or None
        """
        preset = settings.preset
        if preset is None or preset.prompt is None:
            preset = Preset("", "", prompt=ONLY_INPUT)
        if system is None:
            system = settings.system
        if system is not None and system != preset.system:  # the user's system prompt is not a template
            system = system.replace("$", "$$")
        return cls(preset.name, str(preset.prompt), system, {**preset.defaults, **params})

    @property
    def needs_input(self) -> bool:
        """True if the user must give a prompt."""
        return INPUT in variables_in(self.prompt, self.system)

    def check_complete(self) -> None:
        """Raise UsageError if a variable has no value. The message lists all variables without a value."""
        names = variables_in(self.prompt, self.system)
        if missing := [name for name in names if name not in {INPUT, *self.values}]:
            raise UsageError(
                f"preset {self.name}: no value for {', '.join(f'${name}' for name in missing)}",
                hint=" ".join(f"-P {name}=..." for name in missing),
            )

    def filled(self, asked: str) -> tuple[str, str | None]:
        """Return the prompt and the system prompt. All variables must have values.

        If neither template contains `$input`, `asked` is appended to the prompt.
        """
        values = {**self.values, INPUT: asked}
        prompt = Template(self.prompt).substitute(values)
        system = None if self.system is None else Template(self.system).substitute(values)
        return (f"{prompt}\n\n{asked}" if asked and not self.needs_input else prompt), system


def filled_system(settings: Settings, params: Mapping[str, str]) -> str | None:
    """Return the system prompt for a chat or a server. Raises UsageError for `$input`, which has no value there."""
    prompts = replace(Prompts.of(settings, params), prompt="")
    if prompts.needs_input:
        raise UsageError(f"preset {prompts.name}: system: ${INPUT} works only in generate and batch")
    prompts.check_complete()
    return prompts.filled("")[1]
