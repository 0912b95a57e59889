"""Finds the part of a conversation to which a position in its rendered prompt belongs.

Templates are programs, so the parts are found by their texts, in order. Where the texts alone are ambiguous, the
comparison with the earlier conversation decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from llmrun.engine.requests import ChatPrompt

if TYPE_CHECKING:
    from llmrun.engine.requests import Prompt

TEMPLATE: Final = "the template's own text"
SYSTEM: Final = "system prompt"
_TOOLS: Final = "tools"
_KNOWN: Final = 32  # characters by which a text is found if the template has changed its end
_HEAD: Final = 40  # characters that may precede the name of a tool in the rendered definition
_MOST_MISSING: Final = 200  # messages whose text the template has left out; searching for one takes up to a millisecond
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")  # other roles may be any text


class Place(Struct, frozen=True):
    """A part of a prompt.

    where   the part, such as "system prompt" or "message 7 (user)"
    name    the name of the tool, or ""
    detail  how the list of tools differs, or ""
    """

    where: str
    name: str = ""
    detail: str = ""


class _Span(Struct, frozen=True):
    """The characters of a prompt that belong to the tools, or to the message with the number `part`."""

    start: int
    end: int
    part: int | str


def place_of(prompt: Prompt, earlier: Prompt, text: str, at: int) -> Place:
    """Return the part of a prompt that contains its first difference from an earlier prompt.

    text  the rendered prompt
    at    the position of the first different character
    """
    if not isinstance(prompt, ChatPrompt) or not isinstance(earlier, ChatPrompt):
        return Place("prompt")
    spans = sorted(_spans(prompt, text), key=lambda span: span.start)
    before = [span.part for span in spans if span.start <= at]
    if before and _changed(prompt, earlier, before[-1]):
        return _named(prompt, earlier, before[-1])
    if not prompt.tools and earlier.tools and all(part == 0 for part in before):
        return _named(prompt, earlier, _TOOLS)  # the tools are gone, so they have no span
    # The difference lies between two texts that were found: in the header of a message, in a message whose text the
    # template has changed beyond recognition, or in the template's own text.
    found = {span.part for span in spans}
    last = max((part for part in before if isinstance(part, int)), default=-1)
    for number in range(last + 1, max(len(prompt.messages), len(earlier.messages))):
        if number not in found and _changed(prompt, earlier, number):
            return _named(prompt, earlier, number)
        if number in found:
            is_header = len({*_roles(prompt, earlier, number)}) == 2 or number >= len(earlier.messages)
            return _named(prompt, earlier, number) if is_header else Place(TEMPLATE)
    return Place(TEMPLATE)


def answer_after(prompt: ChatPrompt, text: str, at: int) -> int:
    """Return the number of the first answer that ends after a position in the rendered prompt, or of the last one."""
    answers = [number for number, message in enumerate(prompt.messages) if message.get("role") == "assistant"]
    ends = {span.part: span.end for span in _spans(prompt, text)}
    return next((number for number in answers if ends.get(number, -1) > at), answers[-1] if answers else 0)


def message_name(prompt: ChatPrompt, earlier: ChatPrompt, number: int) -> str:
    """Return the name of a message, which is counted from 0, for example "message 7 (user)"."""
    roles = _roles(prompt, earlier, number)
    if number == 0 and roles[:1] in (["system"], ["developer"]):
        return SYSTEM
    return f"message {number + 1}" + (f" ({roles[0]})" if roles and roles[0] in _ROLES else "")


def continues(prompt: Prompt, earlier: Prompt) -> bool:
    """Return whether a conversation continues an earlier one: all of its messages, an answer, and perhaps more."""
    if not isinstance(prompt, ChatPrompt) or not isinstance(earlier, ChatPrompt):
        return False
    n = len(earlier.messages)
    return (
        len(prompt.messages) > n
        and prompt.messages[n].get("role") == "assistant"
        and [*prompt.messages[:n]] == [*earlier.messages]
        and _tools_of(prompt) == _tools_of(earlier)
    )


def _roles(prompt: ChatPrompt, earlier: ChatPrompt, number: int) -> list[str]:
    return [str(each.messages[number].get("role")) for each in (prompt, earlier) if number < len(each.messages)]


def _named(prompt: ChatPrompt, earlier: ChatPrompt, part: int | str) -> Place:
    return _tool_place(prompt, earlier) if isinstance(part, str) else Place(message_name(prompt, earlier, part))


def _changed(prompt: ChatPrompt, earlier: ChatPrompt, part: int | str) -> bool:
    if isinstance(part, str):
        return _tools_of(prompt) != _tools_of(earlier)
    found = [each.messages[part] if part < len(each.messages) else None for each in (prompt, earlier)]
    return found[0] != found[1]


def _spans(prompt: ChatPrompt, text: str) -> Iterator[_Span]:
    end = 0
    tools_from = 0
    first_turn = len(text)
    n_missing = 0
    for number, message in enumerate(prompt.messages):
        found = [span for each in _texts(message) if (span := _find(text, each, end)) is not None]
        if not found:
            n_missing += 1
            if n_missing > _MOST_MISSING:
                break
            continue
        start = min(first for first, _ in found)
        end = max(last for _, last in found)
        if number == 0 and message.get("role") in ("system", "developer"):
            tools_from = end
        else:
            first_turn = min(first_turn, start)
        yield _Span(start, end, number)
    names = [_name(tool) for tool in prompt.tools or ()]
    if names:
        starts = [text.find(f'"{names[0]}"', tools_from, first_turn), text.find(f'"{names[0]}"'), text.find(names[0])]
        first = next((start for start in starts if start >= 0), None)
        if first is not None:
            last = max(text.find(names[-1], first), first)
            yield _Span(max(first - _HEAD, tools_from if first >= tools_from else 0), last, _TOOLS)


def _find(text: str, wanted: str, start: int) -> tuple[int, int] | None:
    """Return where a text begins and ends in the prompt, whose template may have changed the end of the text."""
    wanted = wanted.strip()
    for known in (wanted, wanted[:_KNOWN]):
        if known and (found := text.find(known, start)) >= 0:
            return found, found + len(wanted)
    return None


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message in the order in which templates usually write them."""
    reasoning = (message.get(key) for key in ("reasoning_content", "thinking", "reasoning"))
    yield from (text for text in reasoning if isinstance(text, str))
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else []:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"]


def _tool_place(prompt: ChatPrompt, earlier: ChatPrompt) -> Place:
    ours, theirs = _tools_of(prompt), _tools_of(earlier)
    names, old_names = [*map(_name, ours)], [*map(_name, theirs)]
    pairs = zip(ours, theirs, strict=False)
    number = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    name = [*names[number:], *old_names[number:]][0]
    if names == old_names:
        detail = ""
    elif sorted(names) == sorted(old_names):
        detail = "order"
    elif number < len(names) and names[number] not in old_names:
        detail = "added"
    else:
        detail, name = "removed", old_names[number] if number < len(old_names) else name
    return Place(f"tool {number + 1}", name, detail)


def _tools_of(prompt: ChatPrompt) -> Sequence[Mapping[str, Any]]:
    return [*(prompt.tools or ())]


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else ""
