"""The functions that implement the slash commands, except /help, which is in commands.py beside the table."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from llmrun.base.amounts import counted, format_age, format_number, format_percent, format_seconds_briefly
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.answers.report import described_sampling, stats_lines
from llmrun.cli.arguments import options
from llmrun.cli.arguments.images import COMMAND, has_image_suffix, plain_path, read_image
from llmrun.cli.arguments.options import described_presets
from llmrun.cli.chatting import events, plain
from llmrun.cli.chatting.archive import answer_rows, conversation_table, listed_conversations, words_of
from llmrun.cli.chatting.events import PreferenceSet, SystemSet, Undone
from llmrun.cli.chatting.model_in_use import ModelLost
from llmrun.cli.chatting.saying import resume_conversation
from llmrun.cli.chatting.store import Recording, reporting_file_errors
from llmrun.cli.chatting.tool_call_view import about_rows, tool_rows
from llmrun.cli.console.output import beside, out
from llmrun.cli.console.terminal import room, shortened, visible, visible_line
from llmrun.cli.messages import message_for
from llmrun.options.settings import RULES

if TYPE_CHECKING:
    from llmrun.base.types import Timings
    from llmrun.cli.chatting.session import Chat

CODE = "code"


def retry(chat: Chat, argument: str) -> None:
    if chat.failed_question:
        chat.ask(chat.failed_question)
    elif not chat.conversation.exchanges:
        raise UsageError("/retry: there is no question to answer again")
    else:
        chat.answer_again()


def copy(chat: Chat, argument: str) -> None:
    """Copy the last answer as shown on the screen, with control characters made visible.

    An escape sequence in copied text could run commands when the user pastes the text into a shell.
    """
    from llmrun.cli.console.programs import copy_text

    if argument not in ("", CODE):
        raise UsageError(f"/copy: {argument}: unknown argument", hint="/copy code copies only the last code block")
    answers = [exchange.answer for exchange in chat.conversation.exchanges if exchange.answer]
    if not answers:
        raise UsageError("/copy: there is no answer yet")
    text = _last_code(answers[-1]) if argument else answers[-1]
    if not text:
        raise UsageError("/copy: the last answer has no code block", hint="/copy copies the whole answer")
    where = copy_text(visible(text))
    chat.confirm(f"the last {'code block' if argument else 'answer'} was copied {where}: {len(text):,} characters")


def edit(chat: Chat, argument: str) -> None:
    """Edit a question in $EDITOR. Without an argument, the editor starts with the draft or the last question."""
    from llmrun.cli.console.programs import edited

    if not chat.interactive:
        raise UsageError("/edit: needs a terminal")
    exchanges = chat.conversation.exchanges
    before = argument or chat.draft or (chat.draft_of(exchanges[-1].asked) if exchanges else "")
    try:
        with chat.lend_terminal():
            text = chat.images.from_labels(edited(chat.images.labelled(before)), before)
    except LlmrunError:
        chat.offer(chat.draft)
        raise
    if not text.strip():
        chat.confirm("the text is empty, so nothing was sent")
    elif text == before and not argument:
        chat.offer(text)
        chat.confirm("the text is unchanged, so it was not sent yet")
    else:
        out.reply(f"> {line}" for line in chat.images.labelled(text).splitlines())
        chat.ask(text)


def image(chat: Chat, argument: str) -> None:
    """Put one or more images into the next question. The paths are written as in a shell, or one path as it is."""
    if not argument:
        raise UsageError("/image: no file given", hint="/image ~/cat.jpg, or drop the file into the terminal")
    whole = plain_path(argument)
    paths = [argument] if os.path.lexists(whole) else words_of(argument)
    images = [read_image(plain_path(path), COMMAND) for path in paths]
    chat.see_images()
    chat.add_images(images)


def image_choices(chat: Chat, typed: str) -> Iterable[tuple[str, str]]:
    """Return the folders and image files that complete a path."""
    folder, _, begun = typed.rpartition("/")
    above = f"{folder}/" if "/" in typed else ""
    try:
        entries = sorted(os.scandir(os.path.expanduser(above) or "."), key=lambda entry: entry.name)  # noqa: PTH111
    except OSError:
        return []
    found = [
        f"{above}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(begun)
        and (begun or not entry.name.startswith("."))
        and (entry.is_dir() or has_image_suffix(entry.name))
    ]
    return [(path, "") for path in found[:MOST_COMPLETED]]


def _last_code(answer: str) -> str:
    from markdown_it import MarkdownIt

    blocks = [token.content for token in MarkdownIt().parse(answer) if token.type in ("fence", "code_block")]
    return blocks[-1].removesuffix("\n") if blocks else ""


def model(chat: Chat, name: str) -> None:
    if not name:
        out.reply([f"the model is {visible_line(chat.model)}; /model NAME opens another one"])
        return
    before = chat.engine
    if not _done_with_model(chat, lambda: chat.switch_model(name), f"{visible_line(chat.model)} stays in use"):
        return
    if chat.engine is before:
        chat.confirm(f"{visible_line(chat.model)} is already in use")
        return
    size = chat.engine.info.context_size
    context = f", context {size:,} tokens" if size else ""
    chat.confirm(f"{visible_line(chat.model)} answers from here on{context}; the conversation continues")


def model_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return (dict(_catalogued()) | described_presets()).items()


@functools.cache
def _catalogued() -> tuple[tuple[str, str], ...]:
    """Return all names in the catalogue with their descriptions, or () if the catalogue is invalid.

    The result is cached, because loading the catalogue takes 40 ms.
    """
    from llmrun.hub.catalog import load_catalog

    try:
        return tuple((entry.name, entry.description) for entry in load_catalog().entries())
    except LlmrunError:
        return ()


ALLOW, ASK = "allow", "ask"  # verbs of /tools
DEFAULT = "default"  # this argument resets a setting
_UNBROKEN = "\u00a0"  # a space at which lines do not wrap
MOST_COMPLETED = 200  # maximum number of paths that complete an argument of /image
MOST_LISTED = 10  # maximum number of conversations that /load lists, in addition to copies made by /save


def system(chat: Chat, text: str) -> None:
    if not text:
        out.reply(_system_lines(chat))
        return
    quoted = plain.without_quotes(text)
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
    """Show or change settings. Ollama's notations work, too, such as `/set parameter num_ctx 8192`."""
    argument = argument.removeprefix("parameter ").strip()
    typed, _, value = argument.partition(" ")
    if not typed:
        out.reply(_setting_lines(chat))
        return
    if (elsewhere := _OTHER_COMMANDS.get(typed)) is not None:
        run, fixed = elsewhere
        run(chat, fixed or value.strip())
        return
    value = value.strip()
    name, value = events.meant(typed, value)
    if not value:
        out.reply([f"{name} {_shown(chat.preference(name))}"])
        return
    chosen = None if value == DEFAULT else events.parse_value(name, value)
    if name == events.CONTEXT and not _resized(chat, chosen):
        return
    _prefer(chat, name, chosen)
    default = " (the default)" if chosen is None and chat.preference(name) is not None else ""
    chat.confirm(f"{name} {_shown(chat.preference(name))}{default}")


def _resized(chat: Chat, size: events.Value | None) -> bool:
    """Reopen the model with another context size. If this fails, print the error and return False."""
    if chat.engine.info.backend == "remote":
        raise UsageError(f"/set: {events.CONTEXT}: controlled by {chat.engine.info.device}")
    assert size is None or isinstance(size, int)  # the setting's rule allows nothing else
    kept = f"the context size stays at {chat.engine.info.context_size:,} tokens"
    return _done_with_model(chat, lambda: chat.resize_context(size), kept)


def _done_with_model(chat: Chat, change: Callable[[], object], kept: str) -> bool:
    """Change the open model. If this fails in an interactive chat, print the error and `kept`, and return False."""
    try:
        change()
    except ModelLost:
        raise
    except KeyboardInterrupt:
        if not chat.interactive:
            raise
        chat.confirm(f"stopped; {kept}")
        return False
    except (LlmrunError, OSError) as error:
        if not chat.interactive:
            raise
        out.error((message := message_for(error)).sentence, message.hint)
        chat.confirm(kept)
        return False
    return True


def _setting_lines(chat: Chat) -> list[str]:
    """Return the settings in groups. Each group ends with the names of its settings that are not set."""
    lines = []
    for group, names in events.GROUPS.items():
        values = {name: chat.preference(name) for name in names}
        known = [f"{name}{_UNBROKEN}{_shown(value)}" for name, value in values.items() if value is not None]
        unset = ", ".join(name for name, value in values.items() if value is None)
        text = "; ".join(filter(None, [", ".join(known), f"not set: {unset}" if unset else ""]))
        rows = beside(f"{group:<{max(map(len, events.GROUPS))}}  ", text, room(sys.stderr))
        lines += [row.replace(_UNBROKEN, " ") for row in rows]
    if chat.sent_sampling is not None:
        lines.append("the server chooses the values of settings that are not set")
    return [*lines, "/set NAME VALUE changes a setting, and /set NAME default resets it"]


def _prefer(chat: Chat, name: str, value: events.Value | None) -> None:
    """Set a preference, and reset the preferences that conflict with the new value.

    Thinking conflicts with a thinking budget of 0, and each response format conflicts with all other formats.
    """
    known, set_before = chat.engine.thinking, chat.conversation.preferences
    if name == events.THINK and value and known:
        known.require()
    if name == events.THINK and value and set_before.get(events.THINK_BUDGET) == 0:
        chat.record.add(PreferenceSet(events.THINK_BUDGET, None))
    if name == events.THINK_BUDGET and value == 0 and set_before.get(events.THINK):
        chat.record.add(PreferenceSet(events.THINK, None))
    if name == events.THINK_BUDGET and value is not None and known and known.style is None:
        out.note("this model has no known thinking tags, so the budget has no effect")
    for other in [other for other in options.NAMES if name in options.NAMES and other in set_before and other != name]:
        chat.record.add(PreferenceSet(other, None))
    chat.record.add(PreferenceSet(name, value))


def think(chat: Chat, argument: str) -> None:
    on = events.parse_value(events.THINK, argument or "on") if argument != DEFAULT else None
    _prefer(chat, events.THINK, on)
    words = {
        None: "decides by itself whether to think",
        True: "thinks before it answers",
        False: "answers without thinking",
    }
    holds = chat.preference(events.THINK)
    default = " (the default)" if on is None and holds is not None else ""
    chat.confirm(f"the model {words[None if holds is None else bool(holds)]}{default}")


def answer_at_once(chat: Chat, argument: str) -> None:
    think(chat, "off")


def show(chat: Chat, argument: str) -> None:
    if argument and argument not in SHOWN:
        raise UsageError(f"/show: {argument}: unknown argument", hint="known: " + ", ".join(SHOWN))
    if argument:
        out.reply(SHOWN[argument](chat))
        return
    for lines in (_model_lines, _system_lines, _preference_lines, _meter_lines):
        out.reply(lines(chat))


def clear(chat: Chat, argument: str) -> None:
    left, said = chat.record, bool(chat.conversation.exchanges)
    path = left.path  # saved here, because `start_over` resets the record's path
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
    last = chat.conversation.exchanges[-1]
    shown = chat.conversation.shown_question(last)
    draft = chat.draft_of(last.asked)
    chat.record.add(Undone())
    chat.offer(draft)
    chat.confirm(f"undone: {shortened(visible_line(shown), 100)}")


def save(chat: Chat, name: str) -> None:
    if not chat.conversation.exchanges:
        raise UsageError("/save: there is nothing to save yet")
    if name:
        with reporting_file_errors("/save"), chat.record.saving_images():
            path = chat.store.save(name, chat.conversation)
        chat.confirm(f"saved a copy as {path.stem}; /load {path.stem} continues from here")
    elif chat.record.path:
        out.reply([f"saved automatically in {chat.record.path}; /save NAME saves a named copy"])
    else:
        raise UsageError("/save: this conversation is not being saved", hint="try /save NAME to save a copy")


def load(chat: Chat, name: str) -> None:
    if not name:
        with reporting_file_errors("/load"):
            out.reply(_listed(chat))
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
        chat.confirm(f"{visible_line(held_with)} answered so far; {visible_line(chat.model)} answers from here on")


def tools(chat: Chat, argument: str) -> None:
    """List the tools, describe a tool (`/tools NAME`), or mark a tool (`/tools allow NAME`, `/tools ask NAME`)."""
    toolbox = chat.toolbox
    if toolbox is None:
        raise UsageError("/tools: this chat has no tools", hint="start it with --tools FILE")
    verb, _, name = argument.partition(" ")
    name = name.strip()
    try:
        if verb == ALLOW and name:
            toolbox.mark_safe(name)
            chat.confirm(f"{name} runs without asking, until its definition changes")
        elif verb == ASK and name:
            toolbox.unmark(name)
            chat.confirm(f"{name} asks before every call")
        elif argument:
            info = toolbox.describe(argument)
            out.reply([*tool_rows([info]), *about_rows(info)])
        else:
            found = [toolbox.describe(one) for one in toolbox.names]
            failures = [f"server {server} was left out: {why}" for server, why in toolbox.failures.items()]
            out.reply([*(tool_rows(found) or ["there are no tools"]), *failures])
    except LlmrunError as error:  # an unknown tool or an unsaved mark does not end the chat
        raise UsageError(str(error), hint=error.hint) from error


def tool_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    toolbox = chat.toolbox
    found = [toolbox.describe(name) for name in toolbox.names] if toolbox else []
    return [
        *((info.name, info.description.partition("\n")[0]) for info in found),
        *((f"{ASK} {info.name}", "ask before every call") for info in found if info.is_safe),
        *((f"{ALLOW} {info.name}", "run without asking") for info in found if not info.is_safe),
    ]


def stats(chat: Chat, argument: str) -> None:
    """Show the statistics of the last answer and of all answers, or turn the statistics after each answer on or off."""
    if argument:
        try:
            out.stats = bool(RULES["stats"].parse(argument))
        except ValueError:
            raise UsageError(f"/stats: {argument:.80}: unknown argument", hint="known: on, off") from None
        chat.confirm(
            f"every answer ends with {'detailed statistics' if out.stats else 'a short closing line'} from here on"
        )
        return
    if (last := chat.last_answer) is not None:
        out.reply(["last answer:", *map(visible_line, stats_lines(last))])
    if last is None or len(chat.totals) > 1:
        out.reply([*(["all answers of this chat:"] if last else []), *total_lines(chat.totals)])


def total_lines(answers: Sequence[Timings]) -> list[str]:
    """Return the lines for /stats, given the timings of all answers. Speeds and latencies are medians."""
    if not answers:
        return ["no answers yet"]
    from statistics import median

    prompts = sum(one.prompt_tokens for one in answers)
    cached = sum(one.cached_tokens for one in answers)
    several = [one for one in answers if one.decode_s > 0]
    steps = [one for one in answers if one.steps]
    drafted = sum(one.drafted_tokens for one in steps)
    lines = [
        f"answers     {len(answers)}",
        f"tokens in   {prompts - cached:,} computed, {cached:,} cached from earlier turns",
        f"tokens out  {sum(one.generated_tokens for one in answers):,}",
        f"time        {format_seconds_briefly(sum(one.total_s for one in answers))}",
        f"TTFT        {format_seconds_briefly(median(one.ttft_s for one in answers))} (median)",
    ]
    if several:
        speed = format_number(median(one.decode_per_second for one in several))
        pace = format_seconds_briefly(median(one.tpot_s for one in several))
        lines.append(f"decode      {speed} tok/s, TPOT {pace} (medians)")
    if drafted:
        accepted = sum(one.accepted_tokens for one in steps)
        of_step = sum(one.generated_tokens for one in steps) / sum(one.steps for one in steps)
        lines.append(
            f"drafts      {accepted:,} of {drafted:,} tokens accepted ({format_percent(accepted / drafted)}), "
            f"{format_number(of_step)} tokens per step"
        )
    return lines


def leave(chat: Chat, argument: str) -> None:
    chat.leave()


def load_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [(path.stem, "") for path in (*chat.store.named(), *chat.store.journals())]


def summary(found: Recording) -> str:
    """Return a one-line summary, such as `"Why is the sky blue?", 2 turns, 2 hours ago`."""
    turns = counted(len(found.conversation.exchanges), "turn")
    return f'"{visible_line(found.conversation.title)}", {turns}, {format_age(found.changed, time.time())}'


def preference_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    names = [(f"{name} ", _shown(chat.preference(name))) for name in events.NAMES]
    return [*names, *((f"{events.ON_FULL} {value}", "") for value in RULES[events.ON_FULL].choices)]


def search(chat: Chat, argument: str) -> None:
    """Search the current conversation, then all other conversations."""
    from llmrun.cli.chatting.archive import Hit, hit_lines, matching_lines, search_store

    words = words_of(argument)
    if not words:
        raise UsageError("/search: no words to search for", hint='/search blue sky, or /search "blue sky"')
    here = matching_lines(chat.conversation, words)
    with reporting_file_errors("/search"):
        others, unreadable = search_store(chat.store, words, without=chat.record.path)
    hits = [*([Hit("this conversation", 0, here)] if here else []), *others]
    if not hits:
        out.reply([f"no conversation contains {'this' if len(words) == 1 else 'all of these'}: {', '.join(words)}"])
    out.reply_marked(line for hit in hits for line in hit_lines(hit, room(sys.stderr)))
    if others:
        out.reply(["/load NAME continues one of these conversations"])
    if unreadable:
        out.reply([f"{counted(unreadable, 'conversation')} cannot be read: /load lists them"])


def _listed(chat: Chat) -> list[str]:
    found = listed_conversations(chat.store, MOST_LISTED)
    if not found:
        return ["no conversations yet"]
    more = len(chat.store.journals()) - MOST_LISTED
    lines = conversation_table(found, time.time())
    return [*lines, *([f"and {more} more: llmrun conversations lists them"] if more > 0 else [])]


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
    others = ("seed", "max_tokens", events.STOP, events.ON_FULL)
    chosen = [f"{name} {_shown(chat.preference(name))}" for name in others]
    thinking = [f"{name} {_shown(chat.preference(name))}" for name in events.THINKING]
    formatted = [f"{name} {_shown(chat.preference(name))}" for name in options.NAMES if chat.preference(name)]
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
        lines += [f"> {line}" for line in chat.conversation.shown_question(exchange).splitlines()]
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


SHOWN = {
    "model": _model_lines,
    "template": _template_lines,
    "system": _system_lines,
    "settings": _preference_lines,
    "conversation": _conversation_lines,
}

# The arguments of Ollama's /set that are commands in llmrun, each with its command and the command's fixed argument.
_OTHER_COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "system": (system, ""),
    "model": (model, ""),
    "verbose": (stats, "on"),
    "quiet": (stats, "off"),
    "nothink": (think, "off"),
    "noformat": (set_preference, f"{events.FORMAT_NAME} {DEFAULT}"),
}
