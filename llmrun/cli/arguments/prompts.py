"""Reads prompts, and fills in the variables of a preset's prompts with values from -P, the preset and the user's input.

A prompt comes from arguments, a file or standard input. All text must be UTF-8. Text that is piped to a command is used
even if the user does not ask for it with `-`, because ignored text would be a silent mistake.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.errors import UsageError, nearest
from llmrun.base.folders import decoded_text
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.presets import INPUT, ONLY_INPUT, Preset, variables_in
from llmrun.options.settings import Settings

LARGEST_TEXT = 64 << 20  # bytes; exceeds any context, and protects against endless files such as /dev/zero
STDIN = "-"
IMAGE_SUFFIXES = "png|jpe?g|webp|gif|bmp|heic|heif|avif|tiff?"  # a pattern of the endings of images' names
_STANDARD_INPUT = "standard input"
_PATIENCE_S = 1.0  # seconds without input until a note says that the command is waiting
_CHUNK = 1 << 16  # bytes; the capacity of a pipe on Linux


def read_prompt(
    words: Sequence[str],
    option: str | None,
    file: Path | None,
    *,
    exact: bool = False,
    required: bool = True,
    no_stdin: bool = False,
    image_on_stdin: bool = False,
) -> str:
    """Return the prompt: the given text, the file's text and the piped text, separated by empty lines.

    words     the arguments to join with spaces; each `-` stands for standard input
    option    the value of --prompt, which can be given instead of arguments
    file      a file to append; `-` means standard input
    exact     whether to keep final newlines, to accept an empty prompt, and to append nothing that was not given
    required  whether a missing prompt is an error
    no_stdin  whether to leave standard input unread
    image_on_stdin  whether standard input is an image

    Piped text is appended only if standard input is a pipe or a regular file. If no prompt is given but required, the
    prompt is read from any standard input except a terminal.

    Raises UsageError if the prompt is missing, given twice, or empty (unless `exact` is True), if a file cannot be
    read, or if the text is not UTF-8.
    """
    if words and option is not None:
        raise UsageError(
            "the prompt was given twice: as an argument and with --prompt",
            hint="put a prompt of several words in quotes",
        )
    given = [option] if option is not None else list(words)
    if [*given, str(file)].count(STDIN) + image_on_stdin > 1:
        raise UsageError("standard input can be read only once, but - was given several times")
    named = STDIN in (*given, str(file))
    if named and no_stdin:
        raise UsageError("--no-stdin: cannot be combined with -, which stands for standard input")
    no_stdin = no_stdin or image_on_stdin
    if not given and file is None and required:
        if no_stdin or is_terminal(sys.stdin):
            raise UsageError("no prompt given", hint='llmrun generate "Why is the sky blue?"')
        return _checked(read_stdin(exact=exact), exact)
    parts = [" ".join(adjacent) for _, adjacent in itertools.groupby(given, STDIN.__eq__)]
    blocks = [checked_text(part, "prompt") if part != STDIN else read_stdin(exact=exact) for part in parts]
    if file is not None:
        blocks.append(read_stdin(exact=exact) if str(file) == STDIN else read_text(file, "prompt", exact=exact))
    if not (named or exact or no_stdin) and _is_piped():
        is_rest = _is_partly_read()
        text = read_stdin("text", skipped_by="--no-stdin or < /dev/null")
        if text and (is_rest or is_terminal(sys.stderr)):
            from llmrun.base.amounts import counted  # only this note needs the module

            lines = counted(text.count("\n") + 1, "line")
            out.note(f"the prompt ends with {lines} from standard input; --no-stdin leaves standard input unread")
        blocks.append(text)
    return _checked("\n\n".join(block for block in blocks if block), exact or not required)


def names_image(text: str) -> bool:
    """Return whether a text may contain the name of an image file."""
    return "." in text and re.search(rf"\.(?:{IMAGE_SUFFIXES})\b", text, re.IGNORECASE) is not None


def _is_piped() -> bool:
    """Return whether standard input is a pipe or a regular file, and therefore probably meant for this command.

    Terminals, /dev/null and sockets are not. Editors, supervisors and sshd often start programs with sockets that they
    never close.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or replaced by an object without a descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _is_partly_read() -> bool:
    """Return whether another program has read a part of the file on standard input, as `while read line` does."""
    try:
        return os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR) > 0
    except OSError:  # a pipe
        return False


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


def read_stdin(content: str = "the prompt", *, exact: bool = False, skipped_by: str = "") -> str:
    """Read all of standard input and return the text, without its final newline unless `exact` is True.

    If standard input is a terminal, or if nothing arrives for a while, a note says what the command is waiting for.

    content     a name of the input, for the note
    skipped_by  how to run the command without standard input, for the note
    """
    if is_terminal(sys.stdin):
        out.note(f"reading {content} from the keyboard; press Ctrl-D to finish")
        data = _read(sys.stdin.buffer, _STANDARD_INPUT)
    else:
        skip = f"; to continue without it, use {skipped_by}" if skipped_by else ""
        data = _limited(_received(f"waiting for {content} on standard input{skip}", LARGEST_TEXT), _STANDARD_INPUT)
    return _decoded(data, _STANDARD_INPUT, exact)


def read_stdin_bytes(content: str, most: int) -> bytes:
    """Read all of standard input, which is not a terminal. Reading stops after `most` + 1 bytes.

    content  a name of the input, for the note that appears if nothing arrives for a while
    """
    return _received(f"waiting for {content} on standard input", most)


def read_long_text(file: Path | None, hint: str) -> str:
    """Return the text of --text, or the text of standard input if the flag was not given or is `-`.

    Raises UsageError if the text is missing or empty, if the file cannot be read, or if the text is not UTF-8.

    hint  the advice for users who gave no text
    """
    if file is None and is_terminal(sys.stdin):
        raise UsageError("--text: missing", hint=hint)
    is_stdin = file is None or str(file) == STDIN
    text = read_stdin("the text") if file is None or is_stdin else read_text(file, "--text")
    if text.strip():
        return text
    if is_stdin:
        hint = "name a file with --text FILE, or pipe its text to this command"
        raise UsageError("the text is missing: standard input is empty", hint=hint)
    raise UsageError(f"--text: {file}: the file is empty", hint=hint)


def _received(note: str, most: int) -> bytes:
    """Read standard input to its end or a bit beyond `most` bytes, and print the note if nothing arrives for a while.

    Another thread reads, so Ctrl-C ends the waiting on every system. The thread avoids the buffer of `sys.stdin`, whose
    lock would abort the process if the process ends while the thread waits.
    """
    from queue import Empty, SimpleQueue
    from threading import Thread

    chunks: SimpleQueue[bytes | OSError] = SimpleQueue()
    descriptor = sys.stdin.fileno()

    def read() -> None:
        try:
            while chunk := os.read(descriptor, _CHUNK):
                chunks.put(chunk)
        except OSError as error:
            chunks.put(error)
        else:
            chunks.put(b"")

    Thread(target=read, daemon=True).start()
    data, is_told = bytearray(), False
    while len(data) <= most:
        try:
            chunk = chunks.get(timeout=_PATIENCE_S)
        except Empty:
            if not is_told:
                out.note(note)
            is_told = True
            continue
        if isinstance(chunk, OSError):
            raise UsageError(f"{_STANDARD_INPUT}: {chunk.strerror}") from chunk
        if not chunk:
            break
        data += chunk
    return bytes(data)


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
    return _limited(stream.read(LARGEST_TEXT + 1), where)


def _limited(data: bytes, where: str) -> bytes:
    if len(data) > LARGEST_TEXT:
        raise UsageError(f"{where}: more than {LARGEST_TEXT >> 20} MiB of text")
    return data


def _decoded(data: bytes, where: str, exact: bool) -> str:
    text = decoded_text(data, where)
    # Editors and `echo` add a final newline that is not part of the text.
    return text if exact else text.removesuffix("\n").removesuffix("\r")


def chat_messages(prompt: str, system: str | None, images: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the messages for a chat that consists of one question.

    An empty system prompt is included, because it replaces the chat template's default.

    images  the SHA-256 of each image; images come before the prompt, as in the examples of most models
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    parts = [{"type": "image", "image": key} for key in images]
    return [*before, {"role": "user", "content": [*parts, {"type": "text", "text": prompt}] if parts else prompt}]


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


class Prompts(Struct, frozen=True):
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
