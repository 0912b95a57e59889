"""Converts the events of the engine into the bodies and chunks of chat completions and completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from llmrun.base.types import FinishReason
from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import ChatPrompt, Event, Finished, PrefillProgress, TextDelta, TokenLogprobs
from llmrun.serving.protocol.openai.choices import ChatChoice
from llmrun.serving.protocol.openai.logprobs import CompletionLogprobs, LogprobLimit, chat_logprobs
from llmrun.serving.protocol.openai.messages import call_ids
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.openai.usage import timings, usage
from llmrun.serving.protocol.parsed import checked

_CHUNK: Final = "chat.completion.chunk"


class _Answer(ABC):
    """The answer to one call, which has one or more choices.

    Feed it the events of every choice, in any interleaving, until each has finished. Then, send what `finish` returns
    if the client wants a stream, or `whole` if not.
    """

    def __init__(self, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        """Create an answer without text.

        answer_id  such as "chatcmpl-" and random letters
        created    Unix time in seconds
        """
        self._parsed = parsed
        self._head = {
            "id": answer_id,
            "created": created,
            "model": facts.name,
            "system_fingerprint": facts.fingerprint,
            "seed": parsed.seed,
        }
        self._finished: list[Finished | None] = [None] * len(parsed.requests)
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in parsed.requests]
        self._limit = LogprobLimit()
        self._unsent: list[list[TokenLogprobs]] = [[] for _ in parsed.requests]
        self._has_begun = False

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """Add an event of a choice, and return the chunks to stream.

        Raises the errors of `checked`, and InvalidField for an answer with too many log-probabilities.
        """
        event = checked(event)
        if isinstance(event, PrefillProgress):
            return []
        chunks = [] if self._has_begun else self._begin()
        self._has_begun = True
        if isinstance(event, TextDelta):
            self._keep(choice, event.logprobs)
            return chunks + self._text_chunks(choice, event)
        chunks += self._rest_chunks(choice)
        self._finished[choice] = event
        return [*chunks, self._last_chunk(choice, event)]

    @property
    def is_complete(self) -> bool:
        """Whether all choices have finished."""
        return None not in self._finished

    def finish(self) -> list[dict[str, Any]]:
        """Return the last chunks of a stream, after all choices have finished."""
        if not self._parsed.include_usage:
            return []
        return [{**self._chunk([]), "usage": usage(self._ended(), self._parsed.n)}]

    def _keep(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        self._unsent[choice] += logprobs
        if self._parsed.stream:
            return
        self._logprobs[choice] += logprobs
        self._limit.count(logprobs)

    def _body(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ended = self._ended()
        counts = {"usage": usage(ended, self._parsed.n), "timings": timings(ended)}
        return {"object": kind, **self._head, "choices": [*choices], **counts}

    def _ended(self) -> list[Finished]:
        ended = [each for each in self._finished if each is not None]
        if len(ended) < len(self._finished):
            raise RuntimeError("not all choices have finished")
        return ended

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        no_usage = {"usage": None} if self._parsed.include_usage else {}
        return {"object": self._kind, **self._head, "choices": [*choices], **no_usage}

    def _take_unsent(self, choice: int) -> list[TokenLogprobs]:
        tokens, self._unsent[choice] = self._unsent[choice], []
        return tokens

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The `object` of chunks."""

    @abstractmethod
    def _begin(self) -> list[dict[str, Any]]:
        """Return the chunks that precede all text."""

    @abstractmethod
    def _text_chunks(self, choice: int, event: TextDelta) -> list[dict[str, Any]]:
        """Add a piece of a choice, and return its chunks."""

    @abstractmethod
    def _rest_chunks(self, choice: int) -> list[dict[str, Any]]:
        """Return chunks for the text of a choice that was held back."""

    @abstractmethod
    def _last_chunk(self, choice: int, event: Finished) -> dict[str, Any]:
        """Return the chunk with the finish reason of a choice."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not a stream, after all choices have finished."""


class ChatAnswer(_Answer):
    """The answer to a chat completion. Its chunks contain the same text, tokens and IDs as `whole`."""

    def __init__(self, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        super().__init__(parsed, facts, answer_id, created)
        prompt = parsed.requests[0].prompt
        known = call_ids(prompt.messages) if isinstance(prompt, ChatPrompt) else ()
        self._choices = [ChatChoice(known) for _ in parsed.requests]

    @property
    def _kind(self) -> str:
        return _CHUNK

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": chat_logprobs(self._logprobs[index]) if self._has_logprobs else None,
                "finish_reason": event.reason.value,
            }
            for index, (choice, event) in enumerate(zip(self._choices, self._ended(), strict=True))
        ]
        return self._body("chat.completion", choices)

    @property
    def _has_logprobs(self) -> bool:
        return self._parsed.requests[0].logprobs is not None

    def _begin(self) -> list[dict[str, Any]]:
        # The order matters: OpenAI's client fails if the first chunk is not that of choice 0.
        delta = {"role": "assistant", "content": ""}
        return [self._delta_chunk(index, dict(delta)) for index in range(len(self._choices))]

    def _text_chunks(self, choice: int, event: TextDelta) -> list[dict[str, Any]]:
        return self._delta_chunks(choice, self._choices[choice].take(event))

    def _rest_chunks(self, choice: int) -> list[dict[str, Any]]:
        return self._delta_chunks(choice, self._choices[choice].release())

    def _last_chunk(self, choice: int, event: Finished) -> dict[str, Any]:
        chunk = self._delta_chunk(choice, {}, event.reason.value, self._take_unsent(choice))
        return {**chunk, "timings": timings([event])}

    def _delta_chunks(self, choice: int, deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a chunk for each delta, because many clients expect only one kind of text in a chunk."""
        return [self._delta_chunk(choice, delta, None, self._take_unsent(choice)) for delta in deltas]

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, tokens: Sequence[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(tokens) if tokens else None
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])


class CompletionAnswer(_Answer):
    """The answer to a completion. Choices are numbered by prompt, and then by choice."""

    def __init__(self, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        super().__init__(parsed, facts, answer_id, created)
        self._texts: list[list[str]] = [[] for _ in parsed.requests]
        self._writers = [CompletionLogprobs() for _ in parsed.requests]

    @property
    def _kind(self) -> str:
        return "text_completion"

    def whole(self) -> dict[str, Any]:
        has_logprobs = self._parsed.requests[0].logprobs is not None
        choices = [
            {
                "index": index,
                "text": "".join(self._texts[index]),
                "logprobs": CompletionLogprobs().written(self._logprobs[index]) if has_logprobs else None,
                "finish_reason": _completion_reason(event),
            }
            for index, event in enumerate(self._ended())
        ]
        return self._body(self._kind, choices)

    def _begin(self) -> list[dict[str, Any]]:
        if not self._parsed.echoed:
            return []
        for index, texts in enumerate(self._texts):
            texts.append(self._parsed.echoed[index // self._parsed.n])
        return [self._text_chunk(index, texts[0]) for index, texts in enumerate(self._texts)]

    def _text_chunks(self, choice: int, event: TextDelta) -> list[dict[str, Any]]:
        if not event.text:
            return []
        self._texts[choice].append(event.text)
        return [self._text_chunk(choice, event.text, None, self._take_unsent(choice))]

    def _rest_chunks(self, choice: int) -> list[dict[str, Any]]:
        return []

    def _last_chunk(self, choice: int, event: Finished) -> dict[str, Any]:
        chunk = self._text_chunk(choice, "", _completion_reason(event), self._take_unsent(choice))
        return {**chunk, "timings": timings([event])}

    def _text_chunk(
        self, index: int, text: str, reason: str | None = None, tokens: Sequence[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        logprobs = self._writers[index].written(tokens) if tokens else None
        return self._chunk([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])


def _completion_reason(event: Finished) -> str:
    """Return the finish reason. Completions have no tool calls."""
    return "length" if event.reason is FinishReason.LENGTH else "stop"
