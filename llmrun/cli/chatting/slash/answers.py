"""The slash commands /retry, /copy and /edit, which work on the last question or its answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.console.terminal import visible

if TYPE_CHECKING:
    from llmrun.cli.chatting.session import Chat

CODE = "code"


def retry(chat: Chat, argument: str) -> None:
    if chat.failed_question:
        chat.ask(chat.failed_question)
        return
    if not chat.conversation.exchanges:
        raise UsageError("/retry: there is no question to answer again")
    chat.retry()


def copy(chat: Chat, argument: str) -> None:
    """Copy the last answer as shown on the screen, with control characters made visible.

    Otherwise, an escape sequence that is pasted into a shell could run commands.
    """
    from llmrun.cli.console.clipboard import copy_text

    if argument not in ("", CODE):
        raise UsageError(f"/copy: {argument}: unknown argument", hint="/copy copies the answer, /copy code its code")
    answers = [exchange.answer for exchange in chat.conversation.exchanges if exchange.answer]
    if not answers:
        raise UsageError("/copy: there is no answer yet")
    text = _last_code(answers[-1]) if argument else answers[-1]
    if not text:
        raise UsageError("/copy: the last answer has no code block", hint="/copy copies the whole answer")
    where = copy_text(visible(text))
    chat.confirm(f"the last {'code block' if argument else 'answer'} was copied {where}: {len(text):,} characters")


def edit(chat: Chat, argument: str) -> None:
    """Edit a question in $EDITOR. If there is no argument, start from the draft or the last question."""
    from llmrun.cli.console.editor import edited

    if not chat.interactive:
        raise UsageError("/edit: needs a terminal")
    exchanges = chat.conversation.exchanges
    before = argument or chat.draft or (exchanges[-1].question if exchanges else "")
    try:
        with chat.lend_terminal():
            text = edited(before)
    except LlmrunError:
        chat.offer(chat.draft)
        raise
    if not text.strip():
        chat.confirm("the text is empty, so nothing was sent")
    elif text == before and not argument:
        chat.offer(text)
        chat.confirm("the text is unchanged, so it was not sent yet")
    else:
        chat.reply(f"> {line}" for line in text.splitlines())
        chat.ask(text)


def copy_choices(chat: Chat) -> Iterable[tuple[str, str]]:
    return [(CODE, "only the last code block")]


def _last_code(answer: str) -> str:
    from markdown_it import MarkdownIt

    blocks = [token.content for token in MarkdownIt().parse(answer) if token.type in ("fence", "code_block")]
    return blocks[-1].removesuffix("\n") if blocks else ""
