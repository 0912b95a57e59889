"""The items of an answer, which are written piece by piece as the events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from llmrun.engine.requests import TokenLogprobs
from llmrun.serving.protocol.openai.logprobs import chat_logprobs

COMPLETED: Final = "completed"
IN_PROGRESS: Final = "in_progress"
INCOMPLETE: Final = "incomplete"

StreamEvent = dict[str, Any]  # without `sequence_number`


class Item(ABC):
    """One item of an answer.

    status  in_progress, completed or incomplete
    """

    def __init__(self, prefix: str, answer: str, index: int) -> None:
        """Create an empty item.

        prefix  of the item's ID
        answer  the part of the answer's ID after its prefix; the item's ID follows from it
        index   the place of the item in the answer
        """
        self.id = f"{prefix}_{answer}_{index}"
        self.status = IN_PROGRESS
        self._index = index
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": f"response.{kind}", "output_index": self._index, **fields}

    def _part_event(self, kind: str, **fields: Any) -> StreamEvent:
        return self._event(kind, item_id=self.id, **fields)

    def begin(self) -> list[StreamEvent]:
        """Return the events that announce the item."""
        return [self._event("output_item.added", item=self.written())]

    def end(self, status: str) -> list[StreamEvent]:
        """End the item, and return its last events."""
        self.status = status
        return [*self._end(), self._event("output_item.done", item=self.written())]

    @abstractmethod
    def written(self) -> dict[str, Any]:
        """Return the item so far."""

    @abstractmethod
    def _end(self) -> list[StreamEvent]:
        """Return the events with the complete content of the item."""


class _ContentItem(Item):
    """An item whose content is one part with text.

    kind  of the part
    """

    kind: str

    def begin(self) -> list[StreamEvent]:
        return [*super().begin(), self._content_event("content_part.added", part=self._part())]

    def add(self, text: str, tokens: Sequence[TokenLogprobs]) -> StreamEvent:
        """Add text, and return the event that sends it."""
        self._texts.append(text)
        return self._content_event(f"{self.kind}.delta", delta=text, **self._written_logprobs(tokens))

    def _end(self) -> list[StreamEvent]:
        part = self._part()
        known = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self._content_event(f"{self.kind}.done", **known),
            self._content_event("content_part.done", part=part),
        ]

    def _content_event(self, kind: str, **fields: Any) -> StreamEvent:
        return self._part_event(kind, content_index=0, **fields)

    def _content(self) -> list[dict[str, Any]]:
        """Return the list of parts, which is empty until the item has text."""
        return [] if self.status == IN_PROGRESS and not self._texts else [self._part()]

    @abstractmethod
    def _part(self) -> dict[str, Any]:
        """Return the part so far."""

    @abstractmethod
    def _written_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Keep the log-probabilities of the next tokens, and return the field with them, if there is one."""


class Message(_ContentItem):
    """The text of an answer."""

    kind = "output_text"

    def __init__(self, answer: str, index: int) -> None:
        super().__init__("msg", answer, index)
        self._logprobs: list[dict[str, Any]] = []

    def written(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": self._content(),
        }

    def _part(self) -> dict[str, Any]:
        return {"type": self.kind, "text": self._text, "annotations": [], "logprobs": [*self._logprobs]}

    def _written_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        written = chat_logprobs(tokens)["content"]
        self._logprobs += written
        return {"logprobs": written}


class Reasoning(_ContentItem):
    """The thinking before an answer, which is written as it is, without a summary."""

    kind = "reasoning_text"

    def __init__(self, answer: str, index: int) -> None:
        super().__init__("rs", answer, index)

    def written(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": self._content(),
        }

    def _part(self) -> dict[str, Any]:
        return {"type": self.kind, "text": self._text}

    def _written_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {}


class FunctionCall(Item):
    """A call of a tool. The arguments of one that is cut off are incomplete."""

    def __init__(self, answer: str, index: int, call_id: str, name: str) -> None:
        super().__init__("fc", answer, index)
        self._call_id, self._name = call_id, name

    def add(self, arguments: str) -> StreamEvent:
        """Add a piece of the arguments' JSON text, and return the event that sends it."""
        self._texts.append(arguments)
        return self._part_event("function_call_arguments.delta", delta=arguments)

    def written(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._text,
        }

    def _end(self) -> list[StreamEvent]:
        return [self._part_event("function_call_arguments.done", arguments=self._text)]
