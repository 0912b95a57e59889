"""Shows the last turn of a conversation when a chat continues it."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.base.amounts import counted
from llmrun.cli.chatting.conversation import Conversation
from llmrun.cli.console.columns import wrapped
from llmrun.cli.console.terminal import columns

_MOST_QUESTION_ROWS, _MOST_ANSWER_ROWS = 3, 6
_CUT = "…"


def last_turn(conversation: Conversation) -> list[str]:
    """Return the last answered question and its answer as at most 10 screen rows, or [] if there is no answer.

    Long texts are truncated, and tool calls are only counted. If anything was left out, the last row says how to show
    the whole conversation.
    """
    answered = [exchange for exchange in conversation.exchanges if exchange.answer]
    if not answered:
        return []
    last = answered[-1]
    asked = [f"{'  ' if number else '> '}{row}" for number, row in enumerate(_rows(last.question, columns() - 2))]
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
    """Return the first rows. If some are left out, the last of them is a cut mark."""
    return [*rows] if len(rows) <= most else [*rows[: most - 1], _CUT]
