"""List, show, search, export or remove conversations.

Every chat is saved automatically. A conversation is named after its first words. The beginning of a name is enough if
it is unique. `llmrun chat --continue NAME` continues a conversation.

Examples:
    llmrun conversations
    llmrun conversations search sky blue
    llmrun conversations export why-is -o sky.md
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.base.amounts import counted, format_age
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import conversations_folder
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.arguments.usage import SingleCommand, command_group, refuse_early_flags
from llmrun.cli.chatting.archive import conversation_names
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.chatting.store import Recording, Store

LISTING = {"heading": "Manage files", "place": 115}
FORMATS = {"markdown": "markdown", "md": "markdown", "json": "json"}
NOTHING_FOUND = 1  # the same exit code as grep

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of a conversation, or the beginning of its name.",
        autocompletion=conversation_names,
    ),
]

command = command_group()


@command.callback(invoke_without_command=True)
def conversations(
    context: typer.Context,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    if context.invoked_subcommand is not None:
        refuse_early_flags(context)
        return 0
    return list_all(json_output=json_output, quiet=quiet)


@command.command(
    "list",
    cls=SingleCommand,
    epilog="""\
llmrun conversations list
llmrun conversations list --json""",
    short_help="List all conversations, newest first.",
)
def list_all(json_output: options.Json = False, quiet: options.Quiet = False) -> int:
    """List all conversations, newest first, and the copies that /save made."""
    store = _store(quiet)
    from llmrun.cli.chatting import archive
    from llmrun.cli.chatting.store import reporting_file_errors

    with reporting_file_errors("conversations"):
        found = archive.listed_conversations(store)
    if json_output:
        out.json({"conversations": [archive.listed_as_json(one, store) for one in found]})
    elif not found:
        out.lines(["No conversations yet. `llmrun chat` starts one."])
    else:
        rows = archive.conversation_table(found, time.time())
        out.lines(rows[:1], dim=True)
        out.lines(rows[1:])
    return 0


@command.command(
    "show",
    cls=SingleCommand,
    epilog="""\
llmrun conversations show why-is-the-sky-blue
llmrun conversations show why-is --json""",
    short_help="Show the questions and answers of a conversation.",
)
def show(name: Name, json_output: options.Json = False, quiet: options.Quiet = False) -> int:
    """Show the questions and answers of a conversation."""
    store = _store(quiet)
    found = _found(store, name, "conversations show")
    from llmrun.cli.chatting.archive import model_name, to_json

    conversation = found.conversation
    if json_output:
        out.json(to_json(found.name, conversation, store.images))
        return 0
    turns = counted(len(conversation.exchanges), "turn")
    when = format_age(found.changed, time.time())
    out.lines([f"{found.name}  {model_name(conversation)}  {turns}  {when}"], dim=True)
    if conversation.system is not None:
        out.lines([f"system: {line}" for line in conversation.system.splitlines()], dim=True)
    from llmrun.cli.chatting.archive import round_rows
    from llmrun.cli.chatting.plain import answer_view

    view = answer_view()
    for exchange in conversation.exchanges:
        out.lines(["", *(f"> {line}" for line in conversation.shown_question(exchange).splitlines())])
        for one in exchange.rounds:
            if one.answered.text.strip():
                view.text(one.answered.text)
                view.end()
            out.lines(round_rows(one), dim=True)
        if exchange.began is not None:
            view.text(exchange.answer)
            view.end()
        if exchange.ended is not None and exchange.ended.reason == "cancelled":
            out.lines(["(stopped)"], dim=True)
    return 0


@command.command(
    "search",
    cls=SingleCommand,
    epilog="""\
llmrun conversations search sky blue
llmrun conversations search "blue sky" --json""",
    short_help="Find words in questions and answers.",
)
def search(
    words: Annotated[
        list[str], typer.Argument(metavar="WORDS...", help="Words to find, ignoring case. Quote phrases.")
    ],
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Find questions and answers that contain all the words. The exit code is 1 if nothing is found."""
    words = [word for word in words if word.strip()]
    if not words:
        raise UsageError("conversations search: no words to search for")
    store = _store(quiet)
    from llmrun.cli.chatting.archive import hit_as_json, hit_lines, search_store
    from llmrun.cli.chatting.store import reporting_file_errors
    from llmrun.cli.console.terminal import room

    with reporting_file_errors("conversations search"):
        hits, unreadable = search_store(store, words)
    if unreadable:
        out.note(f"{counted(unreadable, 'conversation')} cannot be read: llmrun conversations lists them")
    if json_output:
        out.json({"conversations": [hit_as_json(hit) for hit in hits]})
        return 0 if hits else NOTHING_FOUND
    now = time.time()
    for hit in hits:
        out.lines_marked(hit_lines(hit, room(sys.stdout), format_age(hit.changed, now)))
    if not hits:
        out.note(f"no conversation contains {'this' if len(words) == 1 else 'all of these'}: {', '.join(words)}")
        return NOTHING_FOUND
    out.note("llmrun chat --continue NAME continues a conversation")
    return 0


@command.command(
    "export",
    cls=SingleCommand,
    epilog="""\
llmrun conversations export why-is-the-sky-blue
llmrun conversations export why-is --format json -o sky.json""",
    short_help="Export a conversation as Markdown or JSON.",
)
def export(
    name: Name,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="Output format: markdown or json.")
    ] = "markdown",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The file to write.  [default: stdout]")
    ] = None,
    quiet: options.Quiet = False,
) -> int:
    """Export a conversation as Markdown, or as JSON with messages in the format of OpenAI's API."""
    if form not in FORMATS:
        raise UsageError(f"--format: {form!r}: unknown format", hint="use markdown or json")
    store = _store(quiet)
    found = _found(store, name, "conversations export")
    from llmrun.cli.chatting.archive import to_json, to_markdown

    if FORMATS[form] == "json":
        body = to_json(found.name, found.conversation, store.images)
        if output is None:
            out.json(body)
        else:
            import json

            from llmrun.cli.console.terminal import visible_json

            _write(output, visible_json(json.dumps(body, ensure_ascii=False, indent=2)) + "\n")
        return 0
    text = to_markdown(found.conversation, store.images)
    if output is None:
        out.answer(text.removesuffix("\n"))
        out.end_answer()
    else:
        _write(output, text)
    return 0


@command.command(
    "rm",
    cls=SingleCommand,
    epilog="""\
llmrun conversations rm why-is-the-sky-blue
llmrun conversations rm hello hello-2""",
    short_help="Remove conversations.",
)
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Names of conversations, or their beginnings.",
            autocompletion=conversation_names,
        ),
    ],
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Remove conversations. Like `llmrun rm`, this command does not ask for confirmation."""
    store = _store(quiet)
    from llmrun.cli.chatting.store import reporting_file_errors

    told: list[dict[str, Any]] = []
    exit_code = 0
    removed: set[Path] = set()  # several names may refer to the same conversation
    for name in names:
        try:
            with reporting_file_errors("conversations rm"):
                path = store.find(name, "conversations rm")
                if path not in removed:
                    store.remove(path)
        except LlmrunError as error:
            exit_code = exit_code or error.exit_code
            told.append({"name": name, "error": str(error)})
            out.error(str(error), error.hint)
            continue
        if path not in removed:
            removed.add(path)
            told.append({"name": path.stem, "file": str(path)})
            if not json_output:
                out.lines([f"{path.stem}: removed"])
    if json_output:
        out.json({"conversations": told})
    return exit_code


def _store(quiet: bool) -> Store:
    apply_settings({"quiet": quiet})
    from llmrun.cli.chatting.store import Store

    return Store(conversations_folder())


def _found(store: Store, name: str, asked: str) -> Recording:
    from llmrun.cli.chatting.store import read_conversation, reporting_file_errors

    with reporting_file_errors(asked):
        return read_conversation(store.find(name, asked))


def _write(path: Path, text: str) -> None:
    path = path.expanduser()
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise LlmrunError(f"--output: {path}: cannot be written: {error.strerror}") from error
    out.note(f"wrote {path}")
