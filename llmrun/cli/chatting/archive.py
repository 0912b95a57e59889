"""Lists, searches, exports and shows saved conversations.

`llmrun conversations` prints a table with one line per conversation. Exports are Markdown, or JSON in which the
messages have the format of OpenAI's API. When a chat continues a conversation, the last turn is shown. The names,
arguments and results of tool calls are untrusted.

Searches ignore case. A question, an answer, a tool call or a result matches if it contains all the words. For each
match, a search returns only the lines that contain at least one of the words.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.base.amounts import counted, format_age
from llmrun.base.errors import LlmrunError
from llmrun.cli.chatting.conversation import Conversation, Exchange, ToolRound
from llmrun.cli.chatting.events import Answered
from llmrun.cli.chatting.store import Store, read_conversation
from llmrun.cli.chatting.tool_call_view import past_call_row, past_result_row
from llmrun.cli.console.output import narrowed, wrapped
from llmrun.cli.console.terminal import columns, shortened, visible, visible_line, width
from llmrun.engine.remote.request import is_endpoint

if TYPE_CHECKING:
    from llmrun.cli.chatting.image_files import ImageFiles
    from llmrun.cli.console.output import MarkedLine


def round_rows(one: ToolRound) -> Iterator[str]:
    """For each call of an answer, yield a row for the call and a row with the beginning of its result."""
    for call in one.calls:
        yield past_call_row(call.name, call.arguments)
        yield past_result_row(one.result(call))


def answer_rows(exchange: Exchange) -> Iterator[str]:
    """Yield the rows for everything after the question of an exchange: texts, calls, results and the answer."""
    for one in exchange.rounds:
        yield from one.answered.text.splitlines()
        yield from round_rows(one)
    yield from exchange.answer.splitlines()


_HEADER = ("NAME", "WHEN", "MODEL", "TURNS", "FIRST WORDS")
# The columns to drop on narrow terminals. FIRST WORDS is dropped early, because most names contain the first words.
_DROPPABLE = (("MODEL",), ("FIRST WORDS",), ("TURNS",))


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry in the list of conversations.

    conversation  the conversation, or None if the file cannot be read; `problem` then contains the reason
    changed       modification time in seconds since the epoch
    """

    path: Path
    conversation: Conversation | None
    changed: float
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.stem


def listed_conversations(store: Store, most: int | None = None) -> list[Listed]:
    """Return all saved copies, and all conversations that have questions or are damaged, newest first.

    Raises OSError if the folder cannot be read.

    most  the maximum number of conversations to read, not counting the copies, or None for no limit
    """
    found = [_read(path) for path in (*store.journals()[:most], *store.named())]
    said = [one for one in found if one.conversation is None or one.conversation.exchanges]
    return sorted(said, key=lambda one: one.changed, reverse=True)


def conversation_table(conversations: Sequence[Listed], now: float) -> list[str]:
    """Format conversations as a table with a header, and return its lines. `now` is in seconds since the epoch."""
    return narrowed(_HEADER, [_row(one, now) for one in conversations], ("TURNS",), _DROPPABLE)


def listed_as_json(one: Listed, store: Store) -> dict[str, Any]:
    """Convert a listed conversation to JSON values, without its messages."""
    conversation = one.conversation
    return {
        "name": one.name,
        "file": str(one.path),
        "saved_copy": store.is_saved_copy(one.path),
        "conversation": conversation.began.conversation if conversation else "",
        "title": conversation.title if conversation else "",
        "model": conversation.model if conversation else "",
        "turns": len(conversation.exchanges) if conversation else 0,
        "created": conversation.began.created if conversation else "",
        "changed": one.changed,
        "problem": one.problem,
    }


def model_name(conversation: Conversation) -> str:
    """Return a short name for the conversation's model. For a file, use the file name without .gguf."""
    model = conversation.model
    if is_endpoint(model):
        return model
    return os.path.basename(model).removesuffix(".gguf") or model  # noqa: PTH119  a model's name is not always a path


def _read(path: Path) -> Listed:
    try:
        found = read_conversation(path)
        return Listed(path, found.conversation, found.changed)
    except (LlmrunError, OSError) as error:
        return Listed(path, None, _changed(path), str(error))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _row(one: Listed, now: float) -> tuple[str, ...]:
    when = format_age(one.changed, now)
    if one.conversation is None:
        return (one.name, when, "", "", f"cannot be read: llmrun conversations show {one.name}")
    turns = str(len(one.conversation.exchanges))
    return (one.name, when, model_name(one.conversation), turns, one.conversation.title)


_REASONS = {"length": "cut", "cancelled": "stopped"}


def to_markdown(conversation: Conversation, images: ImageFiles) -> str:
    """Convert a conversation to Markdown and make control characters visible. Images are links to their files."""
    model = visible_line(model_name(conversation))
    turns = counted(len(conversation.exchanges), "turn")
    parts = [f"# {visible_line(conversation.title)}", f"{model}, {visible_line(conversation.began.created)}, {turns}"]
    if conversation.system is not None:
        parts += ["## System", visible(conversation.system.strip())]
    for exchange in conversation.exchanges:
        parts += ["## You", *_image_links(conversation, exchange, images), visible(exchange.question.strip())]
        if exchange.rounds or exchange.began is not None:
            parts.append(f"## {model}")
        for one in exchange.rounds:
            parts += [*_thinking(one.answered.thinking or ""), visible(one.answered.text.strip()), *_calls(one)]
        if exchange.began is not None:
            parts += _thinking(exchange.thinking)
            parts += [visible(exchange.answer.strip()), *_ending(exchange)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _image_links(conversation: Conversation, exchange: Exchange, images: ImageFiles) -> Iterator[str]:
    for image in exchange.asked.images:
        name = re.sub(r"([\\\[\]])", r"\\\1", visible_line(image.name))
        yield f"![{name} {image.width}x{image.height}]({images.path(image).absolute().as_uri()})"


def to_json(name: str, conversation: Conversation, images: ImageFiles) -> dict[str, Any]:
    """Convert a conversation to JSON values. Images are data URLs. Raises ImageFileError if an image is missing."""
    return {
        "name": name,
        "conversation": conversation.began.conversation,
        "title": conversation.title,
        "model": conversation.model,
        "created": conversation.began.created,
        "settings": dict(conversation.preferences),
        "messages": _messages(conversation, images),
    }


def _messages(conversation: Conversation, images: ImageFiles) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for exchange in conversation.exchanges:
        content = _content(exchange, images)
        messages.append({"role": "user", "content": content, "time": exchange.asked.time})
        for one in exchange.rounds:
            called, *results = one.messages()
            messages += [called | _ending_values(one.answered), *results]
        answered = exchange.answered()
        if answered is not None:
            thinking = {} if answered.thinking is None else {"reasoning_content": answered.thinking}
            told = {"role": "assistant", "content": answered.text, **thinking}
            messages.append(told | _ending_values(answered))
    return messages


def _content(exchange: Exchange, images: ImageFiles) -> str | list[dict[str, Any]]:
    """Return the content of a question in the format of OpenAI's API."""
    content = exchange.content
    if isinstance(content, str):
        return content
    from base64 import b64encode

    shown = iter(exchange.asked.images)
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "image":
            image = next(shown)
            encoded = b64encode(images.read(image)).decode()
            parts.append(
                {"type": "image_url", "image_url": {"url": f"data:image/{image.format.lower()};base64,{encoded}"}}
            )
        else:
            parts.append(part)
    return parts


def _ending_values(answered: Answered) -> dict[str, Any]:
    return {"finish_reason": answered.reason, "seed": answered.seed}


def _thinking(text: str) -> list[str]:
    if not text.strip():
        return []
    return ["<details><summary>Thinking</summary>", visible(text.strip()), "</details>"]


def _calls(one: ToolRound) -> Iterator[str]:
    """Yield the calls of an answer and their results as code blocks, whose text is not parsed as Markdown."""
    for call in one.calls:
        name = visible_line(call.name).replace("`", "'")
        yield f"Tool call: `{name}`"
        yield _code(call.arguments)
        yield "Result:"
        yield _code(one.result(call))


def _code(text: str) -> str:
    """Return a code block with a fence that is longer than any run of backticks in the text."""
    shown = visible(text.strip("\n"))
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{shown}\n{fence}"


def _ending(exchange: Exchange) -> list[str]:
    """Return a note with the reason why an answer is incomplete, or [] if the answer is complete."""
    reason = exchange.ended.reason if exchange.ended else "interrupted"
    return [] if reason == "stop" else [f"*({_REASONS.get(reason, reason)})*"]


_MOST_QUESTION_ROWS, _MOST_ANSWER_ROWS = 3, 6
_CUT = "…"


def last_turn(conversation: Conversation) -> list[str]:
    """Return the last answered question and its answer as at most 10 screen rows, or [] if there is no answer.

    Long texts are truncated, and tool calls are only counted. If any text is left out, the last row names the command
    that shows the whole conversation.
    """
    answered = [exchange for exchange in conversation.exchanges if exchange.answer]
    if not answered:
        return []
    last = answered[-1]
    question = conversation.shown_question(last)
    asked = [f"{'  ' if number else '> '}{row}" for number, row in enumerate(_rows(question, columns() - 2))]
    told = _rows(last.answer, columns())
    count = sum(len(one.calls) for one in last.rounds)
    called = [f"({counted(count, 'tool call')})"] if count else []
    rows = [*_first(asked, _MOST_QUESTION_ROWS), *called, *_first(told, _MOST_ANSWER_ROWS - len(called))]
    if len(answered) > 1 or called or len(rows) < len(asked) + len(told):
        rows.append("/show conversation shows all of it")
    return rows


def _rows(text: str, most: int) -> list[str]:
    return [row for line in text.strip().splitlines() if line.strip() for row in wrapped(line, most)]


def _first(rows: Sequence[str], most: int) -> list[str]:
    """Return at most `most` rows. If rows are left out, the last returned row is a cut mark."""
    return [*rows] if len(rows) <= most else [*rows[: most - 1], _CUT]


MOST_LINES = 5  # maximum number of lines shown per conversation
_CONTEXT = 20  # columns to show before the first match if a line is truncated
_QUESTION, _ANSWER = "  > ", "    "


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a question or an answer. `pieces` alternates between ordinary text and matches, starting with text."""

    is_question: bool
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Hit:
    """A conversation with one or more matching lines. `changed` is in seconds since the epoch."""

    name: str
    changed: float
    lines: list[Line]


def words_of(argument: str) -> list[str]:
    """Split the argument of /search into words. Quotes keep a phrase together."""
    try:
        words = shlex.split(argument)
    except ValueError:  # the argument has an unbalanced quote, such as an apostrophe
        words = argument.split()
    return [word for word in words if word.strip()]


def search_store(store: Store, words: Sequence[str], without: Path | None = None) -> tuple[list[Hit], int]:
    """Search all conversations and saved copies. Return the hits, newest first, and the number of unreadable files.

    The search skips the file `without`, and copies with the same matching lines as the original conversation.
    Raises OSError if the folder cannot be read.
    """
    hits: list[Hit] = []
    known: set[tuple[str, tuple[Line, ...]]] = set()
    unreadable = 0
    for path in (*store.journals(), *store.named()):
        if path == without:
            continue
        try:
            found = read_conversation(path)
        except (LlmrunError, OSError):
            unreadable += 1
            continue
        lines = matching_lines(found.conversation, words)
        same = (found.conversation.began.conversation, tuple(lines))
        if lines and same not in known:
            known.add(same)
            hits.append(Hit(path.stem, found.changed, lines))
    return sorted(hits, key=lambda hit: hit.changed, reverse=True), unreadable


def matching_lines(conversation: Conversation, words: Sequence[str]) -> list[Line]:
    """Return the matching lines of a conversation."""
    patterns = [re.compile(re.escape(unicodedata.normalize("NFC", word)), re.IGNORECASE) for word in words]
    either = re.compile(f"({'|'.join(pattern.pattern for pattern in patterns)})", re.IGNORECASE)
    lines = []
    for exchange in conversation.exchanges:
        asked = conversation.shown_question(exchange)
        for is_question, text in ((True, asked), *((False, text) for text in _told(exchange))):
            shown = [visible_line(line) for line in unicodedata.normalize("NFC", text).splitlines()]
            if all(any(pattern.search(line) for line in shown) for pattern in patterns):
                lines += [Line(is_question, tuple(either.split(line))) for line in shown if either.search(line)]
    return lines


def _told(exchange: Exchange) -> Iterator[str]:
    """Yield the texts that follow a question: the answers, the tool calls and the results of the calls."""
    for one in exchange.rounds:
        yield one.answered.text
        for call in one.calls:
            yield f"{call.name} {call.arguments}"
            yield one.result(call)
    yield exchange.answer


def hit_lines(hit: Hit, most: int, when: str = "") -> Iterator[MarkedLine]:
    """Yield a line with the hit's name, then its matching lines, each truncated to at most `most` columns."""
    yield [(f"{hit.name}  {when}".rstrip(), False)]
    for line in hit.lines[:MOST_LINES]:
        yield [(_QUESTION if line.is_question else _ANSWER, False), *_cut(line.pieces, most - len(_QUESTION))]
    more = len(hit.lines) - MOST_LINES
    if more > 0:
        yield [(f"    … {more} more line{'s' if more > 1 else ''}", False)]


def hit_as_json(hit: Hit) -> dict[str, Any]:
    """Convert a hit, with all its matching lines, to JSON values."""
    lines = [{"role": "user" if line.is_question else "assistant", "text": line.text} for line in hit.lines]
    return {"name": hit.name, "changed": hit.changed, "lines": lines}


def _cut(pieces: Sequence[str], most: int) -> Iterator[tuple[str, bool]]:
    """Truncate a line to `most` columns around its first match."""
    before, *rest = pieces
    if width("".join(pieces)) <= most:
        left = most
    else:
        before = "…" + before[-_CONTEXT:] if width(before) > _CONTEXT else before
        left = most - 1  # reserve a column for the ellipsis at the end
    for number, piece in enumerate([before, *rest]):
        shown = shortened(piece, max(0, left))
        yield shown, number % 2 == 1
        left -= width(shown)
        if shown != piece:
            yield "…", False
            return


def conversation_names() -> list[str]:
    """Return the names of all conversations, newest first, followed by the names of all saved copies."""
    from llmrun.base.folders import conversations_folder
    from llmrun.cli.chatting.store import Store

    store = Store(conversations_folder())
    with contextlib.suppress(OSError):  # the command itself will report an unreadable folder
        return [path.stem for path in (*store.journals(), *store.named())]
    return []
