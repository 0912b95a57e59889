"""List, show or edit your prompt templates.

A template is a file NAME.toml with a prompt and a system prompt, in which $name stands for a variable and $input for
your prompt. It can also set a model and sampling parameters. In generate and chat, `-T NAME` selects a template and
`-P NAME=VALUE` sets a variable.

Examples:
    llmrun templates
    llmrun templates edit summary
    llmrun templates show summary
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.usage import SingleCommand, command_group, refuse_early_flags
from llmrun.cli.console.output import out
from llmrun.options.settings import load_settings

LISTING = {"place": 130}

Name = Annotated[str, typer.Argument(metavar="NAME", help="Template name, or the path of a .toml file.")]

_HEADER = ("NAME", "MODEL", "VARIABLES", "TEXT")
_DROPPABLE = (("MODEL",), ("TEXT",))
_MOST_TEXT = 50  # columns
_STARTER = """\
# $name is a variable, $input is your prompt, and $$ is a dollar sign.
prompt = "Summarize in $language, in one line: $input"
# system = "You are brief."
# model = "qwen3:4b"
# temperature = 0.2

[defaults]
language = "English"
"""

command = command_group()


@command.callback(invoke_without_command=True)
def list_templates(
    context: typer.Context,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    del debug
    if context.invoked_subcommand is not None:
        refuse_early_flags(context)
        return 0
    _prepare(quiet=quiet)
    from llmrun.cli.prompting import template_names, template_path, templates_folder

    found = [_described(name, template_path(name)) for name in template_names()]
    if json_output:
        out.json({"folder": str(templates_folder()), "templates": found})
    elif not found:
        out.lines([f"No templates in {templates_folder()} yet. `llmrun templates edit NAME` creates one."])
    else:
        _show(found)
    return 0


@command.command("show", cls=SingleCommand, epilog="llmrun templates show summary", short_help="Print a template file.")
def show(name: Name, debug: options.Debug = False) -> int:
    """Print a template file. If the template is invalid, print the error instead."""
    del debug
    _prepare()
    from llmrun.cli.prompting import load_template, template_path

    load_template(name)
    out.lines(template_path(name).read_text(encoding="utf-8-sig").splitlines())
    return 0


@command.command(
    "path",
    cls=SingleCommand,
    epilog="llmrun templates path",
    short_help="Print the path of the templates folder or of a template.",
)
def path_of(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Template name.")] = None,
    debug: options.Debug = False,
) -> int:
    """Print the path of the templates folder, or of a template. The file need not exist."""
    del debug
    _prepare()
    from llmrun.cli.prompting import template_path, templates_folder

    out.lines([str(templates_folder() if name is None else template_path(name))])
    return 0


@command.command(
    "edit",
    cls=SingleCommand,
    epilog="llmrun templates edit summary",
    short_help="Open a template in your editor, creating it if needed.",
)
def edit(name: Name, debug: options.Debug = False) -> int:
    """Open a template in $VISUAL, $EDITOR or a common editor, and check it. A new template starts as an example."""
    del debug
    _prepare()
    from llmrun.cli.console.programs import edit_file
    from llmrun.cli.prompting import load_template, template_path

    path = template_path(name)
    try:
        _make(path)
    except OSError as error:
        raise LlmrunError(f"templates: {path}: {error.strerror or error}") from error
    edit_file(path, "the template was not checked")
    load_template(name)
    out.fields([f"saved; use it with -T {shell.quoted(name)}"])
    return 0


def _prepare(*, quiet: bool = False) -> None:
    settings = load_settings({"quiet": quiet or None})
    out.quiet, out.color = settings.quiet, settings.color


def _make(path: Path) -> None:
    """Write the example template unless the file exists."""
    if not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_STARTER, encoding="utf-8")


def _described(name: str, path: Path) -> dict[str, Any]:
    from llmrun.cli.prompting import read_template

    try:
        found = read_template(path, name)
    except UsageError as error:
        return {"name": name, "path": str(path), "problem": str(error)}
    return {
        "name": name,
        "path": str(path),
        "prompt": found.prompt,
        "system": found.system,
        "variables": found.variables,
        "defaults": dict(found.defaults),
        "settings": dict(found.settings),
    }


def _show(found: list[dict[str, Any]]) -> None:
    from llmrun.cli.console.output import narrowed

    whole = [each for each in found if "problem" not in each]
    if whole:
        head, *lines = narrowed(_HEADER, [_row(each) for each in whole], (), _DROPPABLE)
        out.lines([head], dim=True)
        out.lines(lines)
    for each in found:
        if "problem" in each:
            out.note(each["problem"])


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    from llmrun.cli.console.terminal import shortened, width

    text = " ".join((each["prompt"] or each["system"] or "").split())
    variables = [
        name if name not in each["defaults"] else f"{name}={each['defaults'][name]}" for name in each["variables"]
    ]
    return (
        each["name"],
        each["settings"].get("model", ""),
        " ".join(variables),
        text if width(text) <= _MOST_TEXT else shortened(text, _MOST_TEXT - 1) + "…",
    )
