"""Adds, replaces and removes presets in the user's models.toml, and in the template files of earlier versions.

Only the lines of one preset change. We edit the text ourselves, because the libraries that keep a file's style treat a
comment above a heading as a part of the table before the heading, and remove the comment together with that table. They
also do not report lines, which errors need anyway (see toml_text.py). Every new text is parsed before it is written: if
anything but the preset would change, nothing is written.

A lock makes sure that no two commands change the file at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.base.errors import LlmrunError, ModelNotFound, UsageError, nearest
from llmrun.base.folders import cache_folder, decoded_text, own_models_file, templates_folder, write_whole
from llmrun.options.presets import TABLE, parse_template, parse_toml, read_table, template_files
from llmrun.options.settings import checked_in_preset, own_presets
from llmrun.options.toml_text import line_of, statements

_WAIT_S = 10.0  # how long a command waits for another command that changes the same file
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class StoredPreset:
    """A preset as text, which need not be valid.

    name  as written in the file
    path  the file: models.toml, or the preset's own file
    text  the lines of the preset
    """

    name: str
    path: Path
    text: str


def stored_preset(name: str) -> StoredPreset:
    """Return the text of a preset. Raises ModelNotFound, and UsageError for a file that cannot be read or parsed."""
    path = own_models_file()
    text = _text_of(path)
    if (known := _known_name(path, text, name)) is not None:
        start, end = _place(path, text, known)
        return StoredPreset(known, path, text[start:end].replace("\r\n", "\n"))
    file = _template(name)
    return StoredPreset(file.stem, file, _text_of(file))


def add_preset(name: str, table: Mapping[str, Any], *, force: bool = False) -> Path:
    """Add a preset to the user's models.toml and return the file's path. The table is checked like one in the file.

    force  whether to replace an existing preset
    Raises UsageError and LlmrunError.
    """
    path = own_models_file()
    if (file := template_files(templates_folder()).get(name.lower())) is not None:
        hint = f"`llmrun preset edit {name}` changes the preset, and `llmrun preset rm {name}` removes it"
        raise UsageError(f"preset: {name}: already exists: {file}", hint=hint)
    with _locked(path):
        text = _text_of(path)
        known = _known_name(path, text, name)
        if known is not None and not force:
            hint = f"`llmrun preset edit {known}` changes the preset, and --force replaces it"
            raise UsageError(f"preset: {known}: already exists", hint=hint)
        lines = "".join([_heading(name), *(f"{key} = {_value(value)}\n" for key, value in table.items())])
        place = _end(text) if known is None else _place(path, text, known)
        _write(path, text, place, lines, known or name, {name: dict(table)})
    return path


def change_preset(before: StoredPreset, lines: str) -> None:
    """Replace the text of a preset, unless another program has changed the preset in the meantime.

    Raises UsageError if the new text is not a valid preset of the same name, and LlmrunError.
    """
    lines = lines.rstrip("\n") + "\n"
    with _locked(before.path):
        if stored_preset(before.name) != before:
            raise UsageError(f"preset: {before.name}: another program has changed the preset in the meantime")
        if before.path != own_models_file():
            parse_template(before.path, lines.encode("utf-8"), checked_in_preset, own_presets().valid)
            _save(before.path, lines)
            return
        new = parse_toml(lines.encode("utf-8"), before.path, "preset")
        if [*new] != [TABLE] or [*new[TABLE]] != [before.name]:
            raise UsageError(f"preset: the text must contain only {_heading(before.name).strip()} and its keys")
        text = _text_of(before.path)
        _write(before.path, text, _place(before.path, text, before.name), lines, before.name, new[TABLE])


def remove_preset(name: str) -> Path:
    """Remove a preset, and return the path of the file that contained it. Raises ModelNotFound and UsageError."""
    path = own_models_file()
    with _locked(path):
        text = _text_of(path)
        if (known := _known_name(path, text, name)) is not None:
            _write(path, text, _with_blank_lines(text, *_place(path, text, known)), "", known, {})
            return path
        file = _template(name)
        with _writing(file):
            file.unlink()
        return file


def _write(
    path: Path, text: str, place: tuple[int, int], lines: str, name: str, presets: Mapping[str, Mapping[str, Any]]
) -> None:
    """Replace a part of the text, and write the file. Raises UsageError if anything but the preset would change.

    name     the old name of the preset
    presets  the presets in the new lines
    """
    ending = "\r\n" if "\r\n" in text else "\n"
    if place == _end(text) and text:
        lines = ("\n" if text.endswith("\n") else "\n\n") + lines
    new = text[: place[0]] + lines.replace("\n", ending) + text[place[1] :]
    others = own_presets().valid
    for new_name, table in presets.items():
        try:
            read_table(path, new_name, table, checked_in_preset, others)
        except UsageError as error:
            words = str(error).removeprefix(f"catalogue: {path}: ").removeprefix(f"{TABLE}.")
            raise UsageError(f"preset: {words}", hint=error.hint) from None
    wanted, found = (parse_toml(each.encode("utf-8"), path, "catalogue") for each in (text, new))
    kept = {key: table for key, table in wanted.pop(TABLE, {}).items() if key != name}
    if found.pop(TABLE, {}) != {**kept, **presets} or found != wanted:
        raise _not_ours(path, text, name)
    _save(path, new)


def _save(path: Path, text: str) -> None:
    with _writing(path):
        write_whole(Path(os.path.realpath(path)), text.encode("utf-8"))


def _end(text: str) -> tuple[int, int]:
    return len(text), len(text)


def _place(path: Path, text: str, name: str) -> tuple[int, int]:
    """Return where the lines of a preset begin and end. Comments directly below its keys belong to the preset.

    Raises UsageError unless the preset is one or more tables with headings, one after another.
    """
    numbered = [*enumerate(statements(text))]
    own = [(number, one) for number, one in numbered if one.path[:2] == (TABLE, name)]
    if not own or not own[0][1].is_heading or own[-1][0] - own[0][0] != len(own) - 1:
        raise _not_ours(path, text, name)
    end = own[-1][1].end
    for line in text[end:].splitlines(keepends=True):
        if not line.lstrip().startswith("#"):
            break
        end += len(line)
    return own[0][1].start, end


def _with_blank_lines(text: str, start: int, end: int) -> tuple[int, int]:
    """Extend a part of the text by the blank lines that separate it from the rest."""
    below = text[end:]
    if below.strip():
        is_apart = start == 0 or text[:start].endswith(("\n\n", "\n\r\n"))
        return start, end + (len(below) - len(below.lstrip("\r\n")) if is_apart else 0)
    above = len(text[:start].rstrip("\r\n"))
    ending = "\r\n" if text.startswith("\r\n", above) else "\n"
    return (above + len(ending) if above else 0), len(text)


def _not_ours(path: Path, text: str, name: str) -> UsageError:
    line = line_of(text, (TABLE, name)) or 1
    hint = f"edit the file, for example to write the preset as {_heading(name).strip()} with its keys below it"
    return UsageError(f"preset: {path}: line {line}: {name}: written in a form that llmrun cannot change", hint=hint)


def _template(name: str) -> Path:
    """Return the file of a preset that is not in models.toml. Raises ModelNotFound."""
    files = template_files(templates_folder())
    if name.lower() in files:
        return files[name.lower()]
    presets = own_presets()
    known = [*(preset.name for preset in presets.valid.values()), *presets.broken, *files]
    raise ModelNotFound(f"preset: {name!r:.60}: no such preset", hint=nearest(name, known))


def _known_name(path: Path, text: str, name: str) -> str | None:
    """Return the name of a preset as written in models.toml, or None if the text does not contain the preset."""
    tables = parse_toml(text.encode("utf-8"), path, "catalogue").get(TABLE, {})
    if not isinstance(tables, dict):
        raise _not_ours(path, text, name)
    return name if name in tables else next((known for known in tables if known.lower() == name.lower()), None)


def _text_of(path: Path) -> str:
    """Return the text of a file with its line endings and its byte order mark, or "" if the file does not exist."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UsageError(f"preset: {path}: cannot be read: {error.strerror}") from error
    decoded_text(data, f"preset: {path}")  # reports data that is not UTF-8
    return data.decode("utf-8")


def _heading(name: str) -> str:
    return f"[{TABLE}.{_key(name)}]\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)  # TOML has no surrogates


def _value(value: object) -> str:
    """Return a value as TOML. Text with line breaks becomes a multi-line string. Raises UsageError for None."""
    if value is None:
        raise UsageError("preset: models.toml cannot contain null", hint="leave out what is null")
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return '"""\n' + text[1:-1].replace("\\n", "\n") + '"""' if "\n" in value and "\\" not in value else text
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. Lock files are in the cache folder, because the user's folder should stay tidy."""
    import filelock

    folder = cache_folder("locks")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    try:
        with filelock.FileLock(folder / f"presets-{name}.lock", timeout=_WAIT_S):
            yield
    except filelock.Timeout:
        raise UsageError(f"preset: {path}: another llmrun command is changing this file") from None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LlmrunError(f"preset: {path}: cannot be written: {error.strerror or error}") from error
