"""Shows the tool calls of saved conversations. Names, arguments and results are untrusted."""

from __future__ import annotations

from collections.abc import Iterator

from llmrun.cli.chatting.conversation import Exchange, ToolRound
from llmrun.cli.chatting.tools.call_view import past_call_row, past_result_row


def round_rows(one: ToolRound) -> Iterator[str]:
    """Yield a row for each call of an answer, each followed by a row with the beginning of its result."""
    for call in one.calls:
        yield past_call_row(call.name, call.arguments)
        yield past_result_row(one.result(call))


def answer_rows(exchange: Exchange) -> Iterator[str]:
    """Yield the rows of an exchange after its question: texts, calls, results and the answer."""
    for one in exchange.rounds:
        yield from one.answered.text.splitlines()
        yield from round_rows(one)
    yield from exchange.answer.splitlines()
