"""Reads prompts, and fills in the variables of a preset's prompts with values from -P, the preset and the user's input.

A prompt comes from arguments, a file or standard input. All text must be UTF-8.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

from llmrun.base.errors import UsageError, nearest
from llmrun.base.folders import decoded_text
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.presets import INPUT, ONLY_INPUT, Preset, variables_in
from llmrun.options.settings import Settings

LARGEST_TEXT = 64 << 20  # bytes; exceeds any context, and protects against endless files such as /dev/zero
STDIN = "-"


def read_prompt(words: Sequence[str], option: str | None, file: Path | None, *, exact: bool = False) -> str:
    """Return the prompt, which is the given text followed by an empty line and the file's text.

    words   the arguments to join with spaces; each `-` stands for standard input
    option  the value of --prompt, which can be given instead of arguments
    file    a file to append; `-` means standard input
    exact   whether to keep final newlines and to accept an empty prompt

    If there are no words, no option and no file, the prompt is read from standard input, unless standard input is a
    terminal. Otherwise, standard input is read only if `-` is given.

    Raises UsageError if the prompt is missing, given twice, or empty (unless `exact` is True), if a file cannot be
    read, or if the text is not UTF-8.
    """
    if words and option is not None:
        raise UsageError(
            "the prompt was given twice: as an argument and with --prompt",
            hint="put a prompt of several words in quotes",
        )
    given = [option] if option is not None else list(words)
    if [*given, str(file)].count(STDIN) > 1:
        raise UsageError("standard input can be read only once, but - was given several times")
    if not given and file is None:
        if is_terminal(sys.stdin):
            raise UsageError("no prompt given", hint='llmrun generate "Why is the sky blue?"')
        return _checked(read_stdin(exact=exact), exact)
    parts = [" ".join(adjacent) for _, adjacent in itertools.groupby(given, STDIN.__eq__)]
    blocks = [checked_text(part, "prompt") if part != STDIN else read_stdin(exact=exact) for part in parts]
    if file is not None:
        blocks.append(read_stdin(exact=exact) if str(file) == STDIN else read_text(file, "prompt", exact=exact))
    return _checked("\n\n".join(block for block in blocks if block), exact)


def _checked(prompt: str, exact: bool) -> str:
    if not exact and not prompt.strip():
        raise UsageError("the prompt is empty", hint='llmrun generate "Why is the sky blue?"')
    return prompt


def checked_text(text: str, name: str) -> str:
    """Return an argument's text. Raises UsageError if the argument is not valid UTF-8.

    name  the argument's name in the error message
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise UsageError(f"{name}: not UTF-8: byte 0x{byte:02x} after {error.start} characters") from None
    return text


def read_stdin(content: str = "the prompt", *, exact: bool = False) -> str:
    """Read all of standard input and return the text, without its final newline unless `exact` is True.

    content  a name of the input, for the note to users whose standard input is a terminal
    """
    if is_terminal(sys.stdin):
        out.note(f"reading {content} from the keyboard; press Ctrl-D to finish")
    return _decoded(_read(sys.stdin.buffer, "standard input"), "standard input", exact)


def read_text(path: Path, name: str, *, exact: bool = False) -> str:
    """Read a text file and return its text without the final newline. Raises UsageError.

    name   the purpose of the file in the error message
    exact  whether to keep the final newline
    """
    try:
        with path.open("rb") as stream:
            data = _read(stream, str(path))
    except OSError as error:
        raise UsageError(f"{name}: {path}: {error.strerror}") from error
    return _decoded(data, str(path), exact)


def _read(stream: BinaryIO, where: str) -> bytes:
    data = stream.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise UsageError(f"{where}: more than {LARGEST_TEXT >> 20} MiB of text")
    return data


def _decoded(data: bytes, where: str, exact: bool) -> str:
    text = decoded_text(data, where)
    # Editors and `echo` add a final newline that is not part of the text.
    return text if exact else text.removesuffix("\n").removesuffix("\r")


def chat_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages for a chat that consists of one question.

    An empty system prompt is included, because it replaces the chat template's default.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


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
        from string import Template

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
