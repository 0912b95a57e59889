"""The functions that implement most slash commands. The table of commands is in commands.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.amounts import counted
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.arguments import formats
from llmrun.cli.arguments.parsing import described_sampling
from llmrun.cli.chatting import blocks, preferences
from llmrun.cli.chatting.archive.past_calls import answer_rows
from llmrun.cli.chatting.events import PreferenceSet, SystemSet, Undone
from llmrun.cli.chatting.record import resume_conversation
from llmrun.cli.chatting.store import Recording, read_conversation, reporting_file_errors
from llmrun.cli.console.columns import beside
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import room, shortened, visible_line
from llmrun.options.settings import RULES

if TYPE_CHECKING:
    from llmrun.cli.chatting.session import Chat

DEFAULT = "default"  # this argument resets a setting
MOST_LISTED = 10  # maximum number of conversations that /load lists, in addition to copies made by /save


def system(chat: Chat, text: str) -> None:
    if not text:
        chat.reply(_system_lines(chat))
        return
    quoted = blocks.without_quotes(text)
    chosen = chat.default_system if text == DEFAULT else "" if text == '""' else text if quoted is None else quoted
    chat.record.add(SystemSet(chosen))
    chat.confirm(_system_reply(chosen, is_default=text == DEFAULT))


def _system_reply(chosen: str | None, *, is_default: bool) -> str:
    if chosen is None:
        return "the system prompt is reset to the chat template's default, if it has one"
    if is_default:
        return f"the system prompt is reset to the one in your settings: {shortened(visible_line(chosen), 100)}"
    if not chosen:
        return "the system prompt is empty from the next answer on and replaces the template's default"
    return "the system prompt is set and applies from the next answer on"


def set_preference(chat: Chat, argument: str) -> None:
    argument = argument.removeprefix("parameter ").strip()  # Ollama's spelling
    typed, _, value = argument.partition(" ")
    if not typed:
        chat.reply(_preference_lines(chat))
        return
    name = preferences.name_of(typed)
    value = value.strip()
    if value and name == preferences.CONTEXT:
        if not chat.engine.info.context_size:
            raise UsageError(f"/set: {name}: controlled by {chat.engine.info.device}")
        raise UsageError(
            f"/set: {name}: fixed once the model is open",
            hint=f"llmrun chat --continue --ctx-size {visible_line(value):.20}",
        )
    if not value:
        chat.reply([f"{name} {_shown(chat.preference(name))}"])
        return
    chosen = None if value == DEFAULT else preferences.parse_value(name, value)
    _prefer(chat, name, chosen)
    default = " (the default)" if chosen is None and chat.preference(name) is not None else ""
    chat.confirm(f"{name} {_shown(chat.preference(name))}{default}")


def _prefer(chat: Chat, name: str, value: preferences.Value | None) -> None:
    """Set a preference. Thinking and a budget of 0 exclude each other, so setting either one resets the other.

    Setting a format resets any other one.
    """
    known, set_before = chat.engine.thinking, chat.conversation.preferences
    if name == preferences.THINK and value and known:
        known.require()
    if name == preferences.THINK and value and set_before.get(preferences.THINK_BUDGET) == 0:
        chat.record.add(PreferenceSet(preferences.THINK_BUDGET, None))
    if name == preferences.THINK_BUDGET and value == 0 and set_before.get(preferences.THINK):
        chat.record.add(PreferenceSet(preferences.THINK, None))
    if name == preferences.THINK_BUDGET and value is not None and known and known.style is None:
        out.note("this model has no known thinking tags, so the budget has no effect")
    for other in [other for other in formats.NAMES if name in formats.NAMES and other in set_before and other != name]:
        chat.record.add(PreferenceSet(other, None))
    chat.record.add(PreferenceSet(name, value))


def think(chat: Chat, argument: str) -> None:
    on = preferences.parse_value(preferences.THINK, argument or "on") if argument != DEFAULT else None
    _prefer(chat, preferences.THINK, on)
    words = {
        None: "decides by itself whether to think",
        True: "thinks before it answers",
        False: "answers without thinking",
    }
    holds = chat.preference(preferences.THINK)
    default = " (the default)" if on is None and holds is not None else ""
    chat.confirm(f"the model {words[None if holds is None else bool(holds)]}{default}")


def answer_at_once(chat: Chat, argument: str) -> None:
    think(chat, "off")


def show(chat: Chat, argument: str) -> None:
    if argument and argument not in _SHOWN:
        raise UsageError(f"/show: {argument}: unknown argument", hint="known: " + ", ".join(_SHOWN))
    if argument:
        chat.reply(_SHOWN[argument](chat))
        return
    for lines in (_model_lines, _system_lines, _preference_lines, _meter_lines):
        chat.reply(lines(chat))


def clear(chat: Chat, argument: str) -> None:
    left, said = chat.record, bool(chat.conversation.exchanges)
    path = left.path  # read now, because closing the record resets the path
    chat.start_over()
    if said and path is not None:
        chat.confirm(f"cleared; to go back: /load {path.stem}, or later llmrun chat --continue {path.stem}")
    elif said and left.is_given_up:
        chat.confirm("cleared; the previous conversation could not be saved")
    else:
        chat.confirm("cleared; the system prompt and the settings are kept")


def undo(chat: Chat, argument: str) -> None:
    if not chat.conversation.exchanges:
        raise UsageError("/undo: there is nothing to undo")
    question = chat.conversation.exchanges[-1].question
    chat.record.add(Undone())
    chat.offer(question)
    chat.confirm(f"undone: {shortened(visible_line(question), 100)}")


def regenerate(chat: Chat, argument: str) -> None:
    if not chat.conversation.exchanges:
        raise UsageError("/regen: there is no question to answer again")
    chat.answer_again()


def save(chat: Chat, name: str) -> None:
    if not chat.conversation.exchanges:
        raise UsageError("/save: there is nothing to save yet")
    if name:
        with reporting_file_errors("/save"):
            path = chat.store.save(name, chat.conversation)
        chat.confirm(f"saved as {path.stem}; /load {path.stem} continues it")
    elif chat.record.path:
        chat.reply([f"saved automatically in {chat.record.path}; /save NAME saves a named copy"])
    else:
        raise UsageError("/save: this conversation is not being saved", hint="try /save NAME to save a copy")


def load(chat: Chat, name: str) -> None:
    if not name:
        with reporting_file_errors("/load"):
            chat.reply(_listed(chat))
        return
    with reporting_file_errors("/load"):
        path = chat.store.find(name, "/load")
        if path == chat.record.path:
            raise UsageError(f"/load: {path.stem}: already open")
        record, found = resume_conversation(chat.store, path)
    held_with = found.conversation.model
    chat.switch_to(record)
    chat.confirm(f"loaded {summary(found)}")
    if held_with != chat.conversation.model:
        chat.confirm(f"it used {visible_line(held_with)} so far; {visible_line(chat.model)} answers from here on")


def stats(chat: Chat, argument: str) -> None:
    chat.reply(chat.totals.lines())


def leave(chat: Chat, argument: str) -> None:
    chat.leave()


def summary(found: Recording) -> str:
    """Return a one-line summary, such as `"Why is the sky blue?", 2 turns, 2 hours ago`."""
    turns = counted(len(found.conversation.exchanges), "turn")
    return f'"{visible_line(found.conversation.title)}", {turns}, {age(time.time() - found.changed)}'


def age(seconds: float) -> str:
    """Format an age, such as `just now`, `5 minutes ago` or `1 day ago`."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def preference_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    names = [(f"{name} ", _shown(chat.preference(name))) for name in preferences.NAMES if name != preferences.CONTEXT]
    return [*names, *((f"{preferences.ON_FULL} {value}", "") for value in RULES[preferences.ON_FULL].choices)]


def think_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [("on", ""), ("off", ""), (DEFAULT, "")]


def show_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [(name, "") for name in _SHOWN]


def load_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [(path.stem, "") for path in (*chat.store.named(), *chat.store.journals())]


def search(chat: Chat, argument: str) -> None:
    """Search this conversation, then the others."""
    from llmrun.cli.chatting.archive.search import Hit, lines_of, matching, search_store, words_of

    words = words_of(argument)
    if not words:
        raise UsageError("/search: no words to search for", hint='/search blue sky, or /search "blue sky"')
    here = matching(chat.conversation, words)
    with reporting_file_errors("/search"):
        others, unreadable = search_store(chat.store, words, without=chat.record.path)
    hits = [*([Hit("this conversation", 0, here)] if here else []), *others]
    if not hits:
        chat.reply([f"no conversation contains {'this' if len(words) == 1 else 'all of these'}: {', '.join(words)}"])
    out.reply_marked(line for hit in hits for line in lines_of(hit, room(sys.stderr)))
    if others:
        chat.reply(["/load NAME continues one of them"])
    if unreadable:
        chat.reply([f"{counted(unreadable, 'conversation')} cannot be read: /load lists them"])


def _listed(chat: Chat) -> list[str]:
    named, journals = chat.store.named(), chat.store.journals()
    if not named and not journals:
        return ["no conversations yet"]
    shown = [*named, *journals[:MOST_LISTED]]
    widest = max(len(path.stem) for path in shown)
    lines = [f"{visible_line(path.stem):<{widest}}  {_described(path)}" for path in shown]
    more = len(journals) - MOST_LISTED
    return [*lines, *([f"and {more} more: llmrun conversations lists them"] if more > 0 else [])]


def _described(path: Path) -> str:
    try:
        return summary(read_conversation(path))
    except (LlmrunError, OSError) as error:
        return f"cannot be read: {visible_line(str(error)):.80}"


def _model_lines(chat: Chat) -> list[str]:
    info = chat.engine.info
    if info.backend == "remote":
        return [visible_line(f"model       {chat.model}"), visible_line(f"endpoint    {info.path}")]
    return [
        visible_line(
            f"model       {chat.model}: {info.name}, {info.architecture}, {info.file_type}, "
            f"{info.parameters / 1e6:.0f} million parameters, {info.file_bytes / 1e6:.1f} MB"
        ),
        visible_line(f"file        {info.path}"),
        visible_line(f"backend     {info.backend}: {info.device}"),
        f"context     {info.context_size:,} tokens; the model was trained for {info.train_context:,}",
    ]


def _template_lines(chat: Chat) -> list[str]:
    template = chat.engine.template
    if template is None:
        return ["template    chosen by the server, which does not show it"]
    return [f"{visible_line(template.name)} ({template.origin})", *template.source.splitlines()]


def _system_lines(chat: Chat) -> list[str]:
    text = chat.conversation.system
    if text is None:
        return ["system      not set (the chat template may have its own)"]
    first, *rest = text.splitlines() or ["(empty)"]
    return [f"system      {first}", *(f"            {line}" for line in rest)]


def _preference_lines(chat: Chat) -> list[str]:
    others = ("seed", "max_tokens", preferences.STOP, preferences.ON_FULL)
    chosen = [f"{name} {_shown(chat.preference(name))}" for name in others]
    thinking = [f"{name} {_shown(chat.preference(name))}" for name in preferences.THINKING]
    formatted = [f"{name} {_shown(chat.preference(name))}" for name in formats.NAMES if chat.preference(name)]
    return [
        *beside("settings    ", described_sampling(chat.sampling, chat.sent_sampling), room(sys.stderr)),
        *(f"            {', '.join(x)}" for x in (chosen, thinking, formatted) if x),
    ]


def _meter_lines(chat: Chat) -> list[str]:
    kept = f"saved in {visible_line(str(chat.record.path))}" if chat.record.path else "not saved"
    return [
        f"used        {_used(chat)}",
        f"turns       {len(chat.conversation.exchanges)}, {kept}",
    ]


def _used(chat: Chat) -> str:
    used, size = chat.context_used, chat.engine.info.context_size
    if used is None:
        ended = chat.conversation.exchanges[-1].ended
        said_nothing = ended is not None and ended.reason in ("stop", "length") and not ended.prompt_tokens
        return "unknown: the server does not report it" if said_nothing else "known after the next answer"
    return f"{used:,} of {size:,} tokens ({used / size:.0%})" if size else f"{used:,} tokens"


def _conversation_lines(chat: Chat) -> list[str]:
    lines = []
    for exchange in chat.conversation.exchanges:
        lines += [f"> {line}" for line in exchange.question.splitlines()]
        stopped = exchange.ended is not None and exchange.ended.reason == "cancelled"
        lines += [*answer_rows(exchange), *(["(stopped)"] if stopped else [])]
    return [*lines, *_meter_lines(chat)]


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return (
        visible_line(", ".join(map(repr, value)))
        if isinstance(value, list)
        else shortened(visible_line(f"{value}"), 100)
    )


_SHOWN = {
    "model": _model_lines,
    "template": _template_lines,
    "system": _system_lines,
    "settings": _preference_lines,
    "conversation": _conversation_lines,
}
