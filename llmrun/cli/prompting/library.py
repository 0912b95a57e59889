"""Finds the user's prompt templates, which are files in the folder `templates` next to config.toml."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.base.folders import config_file
from llmrun.cli.prompting.template import PromptTemplate, parse_params, read_template

ENDING = ".toml"
_NAME = re.compile(r"\w[\w .-]{0,63}")


def templates_folder() -> Path:
    """Return the folder of the user's templates. The folder might not exist."""
    return config_file().with_name("templates")


def template_names() -> list[str]:
    """Return the names of the user's templates, sorted. Raises UsageError if the folder cannot be read."""
    folder = templates_folder()
    try:
        return sorted(path.stem for path in folder.iterdir() if path.suffix == ENDING and _NAME.fullmatch(path.stem))
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
    if not _NAME.fullmatch(name):
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
