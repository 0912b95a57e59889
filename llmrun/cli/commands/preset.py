"""Add, change or remove presets.

A preset is a name for a model, a prompt and settings. Presets are tables in your models.toml. `llmrun list` lists your
presets, and `llmrun show NAME` shows one.

Examples:
    llmrun preset add pirate -m qwen3:4b -s "You are a pirate." --temp 0.9
    llmrun preset edit pirate
    llmrun preset rm pirate
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import structs

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import (
    AnswerFlags,
    apply_settings,
    names_a_model,
    parse_template_variables,
    takes_answer_flags,
)
from llmrun.cli.arguments.prompts import checked_text
from llmrun.cli.arguments.usage import SingleCommand, command_group
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.presets import SETTINGS
from llmrun.options.settings import preset_named

LISTING = {
    "heading": "Manage files",
    "place": 114,
    "extra": "`llmrun list` lists your presets, and `llmrun show NAME` shows one",
}
_KEPT = {*SETTINGS, "sampling", "lora", "chat_template_kwargs", "quiet"}  # the fields of AnswerFlags that apply
_OTHERS = {field.name for field in fields(AnswerFlags)} - _KEPT
_BRACES = re.compile(r"\{(\w+)\}")  # a variable in the templates of many other programs
_NOTHING = "add a model (-m), a system prompt (-s), a --prompt or a setting such as --temp 0.7"

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the preset.", autocompletion=lambda: [*options.described_presets()]),
]

command = command_group()


@command.command(
    "add",
    cls=SingleCommand,
    epilog="""\
llmrun preset add pirate -m qwen3:4b -s "You are a pirate."
llmrun preset add translate --prompt 'Translate into $language: $input' -P language=English""",
    short_help="Add a preset to models.toml.",
)
@takes_answer_flags(but=_OTHERS)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new preset.")],
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="Model, .gguf file, or server URL#MODEL.",
            autocompletion=options.models,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Prompt; $input stands for your text.")
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("-P", "--param", metavar="NAME=VALUE", help="Default of a variable in --prompt. Repeatable."),
    ] = None,
    *,
    flags: AnswerFlags,
    force: Annotated[bool, typer.Option("--force", help="Replace the preset if it exists.")] = False,
) -> int:
    """Add a preset to models.toml. The rest of the file does not change."""
    apply_settings({"quiet": flags.quiet})
    flags = replace(flags, model=model, params=params)
    table = _table(flags, prompt)
    if not table.keys() - {"lora", "variables", "defaults"}:
        raise UsageError(f"preset: {name}: nothing to save", hint=_NOTHING)

    from llmrun.options.preset_store import add_preset

    hides = preset_named(name) is None and names_a_model(name)
    path = add_preset(name, table, force=force)
    out.lines([f"{name}: saved in {path}"])
    if hides:
        out.note(f"the preset hides the model {name}")
    if prompt is not None and (braces := _BRACES.search(prompt)):
        out.note(f"{braces[0]} is not a variable of the prompt; variables are written as ${braces[1]}")
    out.note(f"to use the preset: {shell.words(['llmrun', 'generate' if prompt else 'chat', '-m', name])}")
    return 0


@command.command(
    "edit",
    cls=SingleCommand,
    epilog="llmrun preset edit pirate",
    short_help="Change a preset in your editor.",
)
def edit(name: Name, quiet: options.Quiet = False) -> int:
    """Change a preset in your editor ($VISUAL or $EDITOR). The new text is checked before it is saved."""
    apply_settings({"quiet": quiet})

    from llmrun.cli.console.programs import edited
    from llmrun.options.preset_store import change_preset, stored_preset

    stored = stored_preset(name)
    text = stored.text.rstrip("\n")
    while True:
        text = edited(text, ".toml")
        if text == stored.text.rstrip("\n"):
            out.note(f"{stored.name}: unchanged")
            return 0
        try:
            change_preset(stored, text)
        except UsageError as error:
            out.error(str(error), error.hint)
            if not _wants_to_edit_again():
                out.note(f"{stored.name}: not saved")
                return error.exit_code
            stored = stored_preset(stored.name)
            continue
        out.lines([f"{stored.name}: saved in {stored.path}"])
        return 0


@command.command(
    "rm",
    cls=SingleCommand,
    epilog="llmrun preset rm pirate translate",
    short_help="Remove presets.",
)
def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Names of presets.", autocompletion=lambda: [*options.described_presets()]
        ),
    ],
    quiet: options.Quiet = False,
) -> int:
    """Remove presets, but not their models. `preset rm` does not ask for confirmation."""
    apply_settings({"quiet": quiet})

    from llmrun.options.preset_store import remove_preset

    exit_code = 0
    for name in names:
        try:
            out.lines([f"{name}: removed from {remove_preset(name)}"])
        except LlmrunError as error:
            exit_code = exit_code or error.exit_code
            out.error(str(error), error.hint)
    return exit_code


def _table(flags: AnswerFlags, prompt: str | None) -> Mapping[str, Any]:
    """Return the preset's keys and values as in models.toml. Raises UsageError, and ModelNotFound for a misspelling."""
    table: dict[str, Any] = {} if flags.model is None else {"model": _lasting(flags.model)}
    if prompt is not None:
        table["prompt"] = checked_text(prompt, "--prompt")
    if flags.system is not None:
        table["system"] = checked_text(flags.system, "--system")
    given = flags.given()
    table |= {name: given[name] for name in SETTINGS if name in given}
    if defaults := flags.prompt_values():
        table["defaults"] = defaults
    if variables := parse_template_variables(flags.chat_template_kwargs):
        table["variables"] = variables
    if flags.lora:
        from llmrun.backends.lora_files import LoraOption

        adapters = [LoraOption.parse(text) for text in flags.lora]
        paths = [Path(os.path.expanduser(one.path)).absolute() for one in adapters]  # noqa: PTH111  (may raise)
        table["lora"] = [structs.replace(one, path=path).text for one, path in zip(adapters, paths, strict=True)]
    return table


def _lasting(model: str) -> str:
    """Return the name of a model, or the absolute path of a file, because presets are used in any folder."""
    from llmrun.engine.remote.request import is_endpoint
    from llmrun.hub.resolve.model_file import LocalPath, existing, understand

    if is_endpoint(model) or preset_named(model) is not None:  # add_preset explains that a preset is not a model
        return model
    meant = understand(model)
    if not isinstance(meant, LocalPath):
        return model
    return meant.name or str(existing(meant).absolute())


def _wants_to_edit_again() -> bool:
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return False
    out.prompt("Edit again? [Y/n] ")
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")
