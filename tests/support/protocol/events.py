"""Random events of an answer."""

from __future__ import annotations

from hypothesis import strategies as st

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, TextDelta, ToolCallDelta
from tests.support.protocol.answers import chosen, ended

TEXTS = st.text(max_size=4)
LOGPROBS = st.lists(st.binary(min_size=1, max_size=3).map(lambda text: chosen(text, -0.5, (text, -0.5))), max_size=2)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
ARGUMENTS = TEXTS | st.just("{}")
IDS = st.sampled_from(["", "call_0", "call_1", "abcdefghi"])


@st.composite
def calls(draw: st.DrawFn, begun: set[int]) -> tuple[ToolCallDelta, ...]:
    """Draw pieces of calls. The indexes grow, and only the first piece of a call has a name."""
    pieces = []
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(begun)))
        is_new = index not in begun
        begun.add(index)
        name, call_id = ("look", draw(IDS)) if is_new else ("", "")
        problem = draw(st.sampled_from(["", "", "cut off"]))
        pieces.append(ToolCallDelta(index, call_id, name, draw(ARGUMENTS), problem))
    return tuple(pieces)


@st.composite
def chats(draw: st.DrawFn, with_calls: bool = True) -> list[Event]:
    """Draw the events of one choice. Text is tentative only until it is certain."""
    may_close, begun, events = draw(st.booleans()), set[int](), []
    for _ in range(draw(st.integers(0, 6))):
        unopened = may_close and draw(st.integers(0, 4)) == 0
        may_close = may_close and not unopened and draw(st.integers(0, 4)) > 0
        events.append(
            TextDelta(
                0,
                draw(TEXTS),
                (1,),
                tuple(draw(LOGPROBS)),
                draw(TEXTS),
                unopened,
                may_close,
                draw(calls(begun)) if with_calls and not may_close else (),
            )
        )
    return [*events, ended(draw(REASONS))]
