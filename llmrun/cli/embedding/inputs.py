"""Reads the texts to embed or to rank: arguments, lines, JSON lines, or whole files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from llmrun.base.amounts import counted
from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompt import STDIN, checked_text, read_stdin, read_text
from llmrun.cli.console.output import out
from llmrun.engine.constraint.strict_json import parse

_JSON_LINES: Final = (".jsonl", ".ndjson")
# The fields of a JSON line with its text: ours, OpenAI's, and those of common data sets.
_FIELDS: Final = ("text", "input", "content", "document")


class Input(NamedTuple):
    """A text.

    place  where it is, for error messages
    name   its name in the output, such as that of its file, or ""
    """

    text: str
    place: str
    name: str = ""


def read_texts(words: Sequence[str], file: Path | None) -> list[Input]:
    """Return the texts in arguments or, if there are none, the lines of a file or of standard input (also as `-`).

    Raises UsageError if both or neither are given, or if a file cannot be read.
    """
    if words and file is not None:
        raise UsageError("the texts were given twice: as arguments and with --file")
    given = () if list(words) == [STDIN] else words
    found = [Input(checked_text(word, "text"), f"text {number}") for number, word in enumerate(given, 1)]
    found = found or _lines(STDIN if file is None else str(file))
    if not found:
        raise UsageError(
            "no texts given", hint='give them as in llmrun embed MODEL "a text", or one per line on standard input'
        )
    return found


def read_documents(names: Sequence[str]) -> list[Input]:
    """Return the documents in files. JSON lines, and standard input (`-`), have one document per line.

    Raises UsageError if there is none, or if a file cannot be read.
    """
    found: list[Input] = []
    for name in names or [STDIN]:
        if name == STDIN or name.endswith(_JSON_LINES):
            found += [each._replace(name=each.name or each.place) for each in _lines(name)]
        else:
            found.append(Input(read_text(Path(name), "document"), name, name))
    if not found:
        raise UsageError("no documents given", hint='name their files, as in llmrun rerank MODEL "a query" docs/*.txt')
    return found


def _lines(name: str) -> list[Input]:
    """Return the text of each line that is not empty, and tell how many are."""
    whole = read_stdin("texts, one per line,") if name == STDIN else read_text(Path(name), "--file")
    is_json = name.endswith(_JSON_LINES) or (name == STDIN and whole.lstrip().startswith("{"))
    file = "stdin" if name == STDIN else name
    # Texts may contain other characters at which `splitlines` splits, such as U+2028.
    lines = whole.split("\n")
    texts = {f"{file}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if texts and (empty := len(lines) - len(texts)):
        out.note(f"{file}: {counted(empty, 'empty line')} left out, so texts are numbered without them")
    return [
        _of_json(line, place) if is_json else Input(line.removesuffix("\r"), place) for place, line in texts.items()
    ]


def _of_json(line: str, place: str) -> Input:
    """Return the text of a JSON line, which is a string or an object. Raises UsageError."""
    try:
        found = parse(line)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place}: a string has an unpaired surrogate") from None
    except RecursionError:
        raise UsageError(f"{place}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{place}: not valid JSON: {error}") from None
    if isinstance(found, str):
        return Input(found, place)
    text = next((found[name] for name in _FIELDS if name in found), None) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise UsageError(
            f"{place}: no text: must be a string, or an object with {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}"
        )
    id_ = found.get("id", found.get("custom_id", ""))
    return Input(text, place, id_ if isinstance(id_, str) else json.dumps(id_, ensure_ascii=False))
