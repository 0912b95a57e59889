"""Reads prompts and parses flags into values for the engine.

A prompt comes from arguments, a file or standard input. All text must be UTF-8.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llmrun.base.errors import UsageError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.sampling_params import SAMPLING, value_text

if TYPE_CHECKING:
    from llmrun.options.sampling_params import SamplingParams

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
    try:
        # Editors and `echo` add a final newline that is not part of the text; some systems add a byte order mark.
        text = data.decode("utf-8-sig")
        return text if exact else text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert the text first, for example with iconv -f latin1 -t utf8",
        ) from None


def chat_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages for a chat that consists of one question.

    An empty system prompt is included, because it replaces the chat template's default.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def described_sampling(sampling: SamplingParams, sent: frozenset[str] | None = None) -> str:
    """Describe the sampling parameters in effect, as in `temperature 0.8, top_k 40, ...`.

    sent  the names of the parameters that are sent to a server; None for local models
    """
    values = {name: getattr(sampling, name) for name in SAMPLING}
    wanted = [
        name
        for name, parameter in SAMPLING.items()
        if (name in sent if sent is not None else not parameter.optional or values[name] != parameter.default)
    ]
    known = ", ".join(f"{name} {value_text(values[name])}" for name in wanted)
    if sent is None:
        return known
    return f"{known}; the server decides the rest" if known else "the server decides"


def parse_stops(texts: Sequence[str]) -> tuple[str, ...]:
    """Check the values of --stop. Raises UsageError if a value is empty or not UTF-8."""
    for text in texts:
        if not checked_text(text, "--stop"):
            raise UsageError("--stop: the text must not be empty")
    return tuple(texts)


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """Parse `["29889=-inf", "7=2.5"]` into `{29889: -inf, 7: 2.5}`. Raises UsageError."""
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias: {pair!r} is not ID=BIAS, as in 29889=-2.5 or 29889=-inf") from None
        if not biases[int(token)] < math.inf:
            raise UsageError(f"--logit-bias: {pair!r}: the bias must be a number or -inf")
    return biases


def parse_template_variables(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of --chat-template-kwargs, or return {} if it was not given. Raises UsageError."""
    if text is None:
        return {}
    try:
        variables = json.loads(checked_text(text, "--chat-template-kwargs"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs: not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise UsageError('--chat-template-kwargs: not a JSON object, as in {"enable_thinking": false}')
    return variables


def check_gguf_name(output: Path) -> None:
    """Raise UsageError unless the name of a file to write ends in .gguf."""
    if output.suffix != ".gguf":
        better = output / "model.gguf" if output.is_dir() else output.with_suffix(".gguf")
        raise UsageError(f"OUT: {output}: the name must end in .gguf", hint=f"try {better}")
