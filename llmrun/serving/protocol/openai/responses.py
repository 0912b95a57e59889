"""Converts the events of the engine into the bodies and chunks of chat completions and completions.

The bodies include log-probabilities in the two forms of OpenAI's API, token counts and timings. This module also writes
the list of models.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llmrun.base.types import Timings, TokenLogprob
from llmrun.engine.remote.client import OWNER
from llmrun.engine.requests import (
    ChatPrompt,
    Event,
    Finished,
    ModelFacts,
    PrefillProgress,
    PromptDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)
from llmrun.options.sampling_params import SAMPLING
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.openai import objects
from llmrun.serving.protocol.openai.custom_tools import InputReader, custom_names
from llmrun.serving.protocol.openai.messages import call_ids
from llmrun.serving.protocol.openai.objects import Delta
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.parsed import checked

_MOST: Final = 2_000_000  # log-probabilities of one answer, 150 bytes each
_NEVER: Final = -9999.0  # OpenAI's value for very unlikely tokens; JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> objects.ChatLogprobs:
    """Return the `logprobs` of a chat completion's choice for tokens in the order of the answer."""
    content: list[objects.TokenLogprobs] = [
        {**token_entry(token.chosen), "top_logprobs": [*map(token_entry, token.top)]} for token in tokens
    ]
    return {"content": content, "refusal": None}


class LogprobLimit:
    """Limits the number of log-probabilities that are stored for one answer."""

    def __init__(self) -> None:
        self._n = 0

    def count(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Count the log-probabilities of the next tokens. Raises InvalidField if the total is too large."""
        self._n += sum(1 + len(token.top) for token in tokens)
        if self._n > _MOST:
            words = f"the answer has more than {_MOST:,} log-probabilities"
            raise InvalidField("logprobs", words, hint="ask for fewer log-probabilities, or set max_tokens")


class CompletionLogprobs:
    """Writes the `logprobs` of one choice of a completion, piece by piece.

    `text_offset` is the position of a token's text in the joined text of all tokens, which begins with the prompt if
    the request set `echo`. In addition to the choice's text, the joined text contains control tokens, and the stop
    string if one ended the answer.
    """

    def __init__(self, prompt: str | None, most: int) -> None:
        """Begin with the first token of the prompt, or of the answer if `prompt` is None.

        most  the number of likeliest tokens that the request asks for
        """
        self._prompt, self._most = prompt, most
        self._begins = True
        self._offset = 0  # characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def written(self, tokens: Sequence[TokenLogprobs]) -> objects.TextLogprobs:
        """Return the `logprobs` of the next tokens. The first token of a prompt has null instead of numbers."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += self._width(self._utf8.decode(token.chosen.text))
        chosen: list[float | None] = [_finite(token.chosen.logprob) for token in tokens]
        tables: list[dict[str, float] | None] = [_table(token) for token in tokens]
        if tokens and self._begins and self._prompt is not None:
            chosen[0] = tables[0] = None
        self._begins = self._begins and not tokens
        return {
            "tokens": [_spelled(token.chosen.text) for token in tokens],
            "token_logprobs": chosen,
            "top_logprobs": tables if self._most else None,
            "text_offset": offsets,
        }

    def _width(self, text: str) -> int:
        """Return how many characters of the text a token stands for.

        This can be less than the token's own text, because tokenizers add a BOS, and some add a space, before a prompt.
        """
        if self._prompt is None or self._offset or self._prompt.startswith(text):
            return len(text)
        return len(text) - 1 if text.startswith(" ") and self._prompt.startswith(text[1:]) else 0


def token_entry(token: TokenLogprob) -> objects.TokenEntry:
    """Return a token with its log-probability."""
    text = token.text.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(token.logprob), "bytes": [*token.text]}


def _table(token: TokenLogprobs) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens and the chosen token by their texts, as in OpenAI's API.

    If several tokens have the same text, the likeliest token is kept.
    """
    table: dict[str, float] = {}
    for each in (*token.top, token.chosen):
        table.setdefault(_spelled(each.text), _finite(each.logprob))
    return table


def _spelled(text: bytes) -> str:
    r"""Return the text of a token, or OpenAI's notation for incomplete characters, such as bytes:\xe2\x80."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER


def usage(finished: Sequence[Finished], n: int) -> objects.Usage:
    """Return `usage` for the choices of a call. Each prompt has `n` consecutive choices.

    A prompt counts once, regardless of its number of choices. The number of cached tokens is the smallest number among
    the prompt's choices, because the other choices also reuse tokens that this call computed.
    """
    timings = [each.timings for each in finished]
    firsts = timings[::n]
    cached = [min(each.cached_tokens for each in timings[at : at + n]) for at in range(0, len(timings), n)]
    prompt, completion = sum(each.prompt_tokens for each in firsts), sum(each.generated_tokens for each in timings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.thinking_tokens for each in finished)},
    }


def timings(finished: Sequence[Finished]) -> objects.Timings:
    """Return `timings` for the choices of a call, as `timings_of` does."""
    return timings_of([one.timings for one in finished])


def timings_of(each: Sequence[Timings]) -> objects.Timings:
    """Return `timings` in llama-server's form. For several choices, token counts are summed, and times are maxima."""
    prompt_n = sum(one.prompt_tokens - one.cached_tokens for one in each)
    predicted_n = sum(one.generated_tokens for one in each)
    later_n = sum(max(0, one.generated_tokens - 1) for one in each)  # the prompt time includes the first tokens
    prompt_s = max((one.prefill_s for one in each), default=0.0)
    predicted_s = max((one.decode_s for one in each), default=0.0)
    found: objects.Timings = {
        "cache_n": sum(one.cached_tokens for one in each),
        "prompt_n": prompt_n,
        "prompt_ms": _ms(prompt_s),
        "prompt_per_token_ms": _ms(prompt_s / prompt_n) if prompt_n else 0.0,
        "prompt_per_second": _rate(prompt_n, prompt_s),
        "predicted_n": predicted_n,
        "predicted_ms": _ms(predicted_s),
        "predicted_per_token_ms": _ms(predicted_s / later_n) if later_n else 0.0,
        "predicted_per_second": _rate(later_n, predicted_s),
    }
    if drafted := sum(one.drafted_tokens for one in each):
        found["draft_n"] = drafted
        found["draft_n_accepted"] = sum(one.accepted_tokens for one in each)
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0


_ID_LETTERS: Final = 24  # the length of OpenAI's IDs without the prefix


@dataclass(slots=True)
class _Call:
    """A call of a message. `index` is the call's position among the calls that the client knows.

    input  reads the input of a custom tool; None for functions
    texts  the pieces of the arguments, or of the input
    """

    index: int
    id: str
    name: str
    input: InputReader | None
    texts: list[str] = field(default_factory=list)

    def add(self, arguments: str) -> list[objects.ToolCallPiece]:
        """Add the next piece of the arguments, and return the pieces to send."""
        text = arguments if self.input is None else self.input.add(arguments)
        is_first = not self.texts
        if not (text or is_first):
            return []
        self.texts.append(text)
        piece: objects.ToolCallPiece = {"index": self.index}
        if is_first:
            piece["id"], piece["type"] = self.id, "function" if self.input is None else "custom"
        if self.input is None:
            piece["function"] = {"name": self.name, "arguments": text} if is_first else {"arguments": text}
        else:
            piece["custom"] = {"name": self.name, "input": text} if is_first else {"input": text}
        return [piece]

    def written(self) -> objects.AnswerCall | objects.AnswerCustomCall:
        """Return the whole call."""
        text = "".join(self.texts)
        if self.input is None:
            return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": text}}
        return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": text}}


class ChatChoice:
    """Builds the message of one choice.

    Text that may still turn out to be thinking is held back, because text that was sent cannot be withdrawn.
    """

    def __init__(self, known_ids: Iterable[str], custom: Collection[str] = ()) -> None:
        """Create an empty message.

        known_ids  the IDs of earlier tool calls in the conversation
        custom     the names of the custom tools
        """
        self._answer: list[str] = []
        self._thoughts: list[str] = []
        self._held: list[str] = []
        self._calls: dict[int, _Call] = {}  # maps the engine's indices to calls
        self._ids, self._custom = set(known_ids), custom

    def take(self, delta: TextDelta) -> list[Delta]:
        """Add the next piece of the answer, and return the deltas to send, in order."""
        thought = delta.reasoning
        if delta.unopened:
            thought = "".join(self._held) + thought
            self._held = []
        deltas: list[Delta] = []
        if thought:
            self._thoughts.append(thought)
            deltas.append({"reasoning_content": thought})
        self._held.append(delta.text)
        if not delta.tentative:
            deltas += self.release()
        for piece in delta.tool_calls:
            deltas += self._take_call(piece)
        return deltas

    def release(self) -> list[Delta]:
        """Return the held-back text. Call this method when the text certainly belongs to the answer, or at the end."""
        text = "".join(self._held)
        self._held = []
        if not text:
            return []
        self._answer.append(text)
        return [{"content": text}]

    def message(self) -> objects.AnswerMessage:
        """Return the complete message."""
        content = "".join(self._answer)
        message: objects.AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [call.written() for call in self._calls.values()]
        return message

    def _take_call(self, piece: ToolCallDelta) -> list[Delta]:
        """Add a piece of a tool call. Truncated calls keep their incomplete arguments, as in OpenAI's API."""
        call = self._calls.get(piece.index)
        if call is None:
            reader = InputReader() if piece.name in self._custom else None
            call = _Call(len(self._calls), self._unused_id(piece.id), piece.name, reader)
            self._calls[piece.index] = call
        return [{"tool_calls": [each]} for each in call.add(piece.arguments)]

    def _unused_id(self, given: str) -> str:
        """Return the given ID of a call, or a new ID if an earlier call has the given ID.

        The engine's IDs are kept where possible, because they depend only on the seed, and some templates write them
        into the prompt. With another ID in the prompt, the next request could not reuse the cached prefix.
        """
        found = given
        for number in itertools.count():
            if found and found not in self._ids:
                break
            letters = hashlib.sha256(f"{given} {len(self._ids)} {number}".encode()).hexdigest()
            found = f"call_{letters[:_ID_LETTERS]}"
        self._ids.add(found)
        return found


def choice_of(prompt: ChatPrompt) -> ChatChoice:
    """Return an empty message that answers a prompt."""
    return ChatChoice(call_ids(prompt.messages), custom_names(prompt.tools))


Part = dict[str, Any]  # the field of a choice that contains the choice's text


class _Answer(ABC):
    """The answer to one call, with one or more choices. Chunks contain the same text, tokens and IDs as `whole`.

    kind        the `object` of the body
    chunk_kind  the `object` of chunks
    nothing     the part of a chunk without text
    unread      the part of a chunk that reports the progress of the prompt
    """

    kind: str
    chunk_kind: str
    nothing: Part
    unread: Part

    def __init__(self, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        """Create an empty answer.

        answer_id  an ID such as "chatcmpl-" followed by random letters
        created    the Unix time in seconds
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
        """See ApiAnswer. Raises InvalidField if the answer has too many log-probabilities."""
        event = checked(event)
        if isinstance(event, PrefillProgress):
            return []
        chunks = self.begin()
        if isinstance(event, TextDelta):
            self._keep(choice, event.logprobs)
        parts = self._take(choice, event) if isinstance(event, TextDelta) else self._rest(choice)
        chunks += [self._choice_chunk(choice, part, None, self._take_unsent(choice)) for part in parts]
        if isinstance(event, Finished):
            self._finished[choice] = event
            last = self._choice_chunk(choice, self.nothing, event.reason.value, self._take_unsent(choice))
            chunks.append({**last, "timings": timings([event])})
        return chunks

    def begin(self, prompt_tokens: int = 0) -> list[dict[str, Any]]:
        """See PatientAnswer."""
        chunks = [] if self._has_begun else [self._choice_chunk(index, part) for index, part in self._begin()]
        self._has_begun = True
        return chunks

    def progress(self, choice: int, told: objects.PromptProgress) -> list[dict[str, Any]]:
        """See ProgressAnswer."""
        return [{**self._choice_chunk(choice, self.unread), "prompt_progress": told}]

    @property
    def is_complete(self) -> bool:
        """True if all choices have finished."""
        return None not in self._finished

    def finish(self) -> list[dict[str, Any]]:
        """See ApiAnswer."""
        if not self._parsed.include_usage:
            return []
        return [{**self._chunk([]), "usage": usage(self._ended(), self._parsed.n)}]

    def whole(self) -> dict[str, Any]:
        """See ApiAnswer."""
        ended, wants_logprobs = self._ended(), self._parsed.requests[0].logprobs is not None
        choices = [
            {
                "index": index,
                **self._written(index),
                "logprobs": self._all_logprobs(index) if wants_logprobs else None,
                "finish_reason": event.reason.value,
            }
            for index, event in enumerate(ended)
        ]
        counts = {"usage": usage(ended, self._parsed.n), "timings": timings(ended)}
        return {"object": self.kind, **self._head, "choices": choices, **counts}

    def _keep(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> None:
        self._unsent[choice] += logprobs
        if self._parsed.stream:
            return
        self._logprobs[choice] += logprobs
        self._limit.count(logprobs)

    def _ended(self) -> list[Finished]:
        ended = [each for each in self._finished if each is not None]
        if len(ended) < len(self._finished):
            raise RuntimeError("not all choices have finished")
        return ended

    def _choice_chunk(
        self, index: int, part: Part, reason: str | None = None, tokens: Sequence[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        logprobs = self._next_logprobs(index, tokens) if tokens else None
        return self._chunk([{"index": index, **part, "logprobs": logprobs, "finish_reason": reason}])

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        no_usage = {"usage": None} if self._parsed.include_usage else {}
        return {"object": self.chunk_kind, **self._head, "choices": [*choices], **no_usage}

    def _take_unsent(self, choice: int) -> list[TokenLogprobs]:
        tokens, self._unsent[choice] = self._unsent[choice], []
        return tokens

    @abstractmethod
    def _begin(self) -> list[tuple[int, Part]]:
        """Return the parts that precede all text, each with the number of its choice."""

    @abstractmethod
    def _take(self, choice: int, delta: TextDelta) -> list[Part]:
        """Add a piece of a choice, and return the parts to send."""

    @abstractmethod
    def _rest(self, choice: int) -> list[Part]:
        """Return the held-back parts of a choice."""

    @abstractmethod
    def _written(self, choice: int) -> Part:
        """Return the complete part of a choice."""

    @abstractmethod
    def _next_logprobs(self, choice: int, tokens: Sequence[TokenLogprobs]) -> Mapping[str, Any]:
        """Return the `logprobs` of the next tokens in a choice's stream."""

    @abstractmethod
    def _all_logprobs(self, choice: int) -> Mapping[str, Any]:
        """Return the `logprobs` of all tokens of a choice."""


class ChatAnswer(_Answer):
    """The answer to a chat completion."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    nothing: Part = {"delta": {}}  # noqa: RUF012  never changed
    unread: Part = {"delta": {"role": "assistant", "content": None}}  # noqa: RUF012

    def __init__(self, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        super().__init__(parsed, facts, answer_id, created)
        prompts = [request.prompt for request in parsed.requests]
        self._choices = [choice_of(prompt) if isinstance(prompt, ChatPrompt) else ChatChoice(()) for prompt in prompts]

    def patience_s(self, client: str) -> float:
        """See PatientAnswer. By default, Qwen Code waits 240 s for a chunk, and comments do not count."""
        return 100.0

    def keep_alive(self) -> list[dict[str, Any]]:
        """See PatientAnswer."""
        return [self._choice_chunk(0, {"delta": {"content": ""}})]

    def progress(self, choice: int, told: objects.PromptProgress) -> list[dict[str, Any]]:
        # All choices have the same prompt, and OpenAI's client fails if the first chunk does not belong to choice 0.
        return [] if choice else super().progress(choice, told)

    def _begin(self) -> list[tuple[int, Part]]:
        # The order matters, because OpenAI's client fails if the first chunk does not belong to choice 0.
        return [(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(len(self._choices))]

    def _take(self, choice: int, delta: TextDelta) -> list[Part]:
        # Many clients expect only one kind of text in a chunk.
        return [{"delta": each} for each in self._choices[choice].take(delta)]

    def _rest(self, choice: int) -> list[Part]:
        return [{"delta": each} for each in self._choices[choice].release()]

    def _written(self, choice: int) -> Part:
        return {"message": self._choices[choice].message()}

    def _next_logprobs(self, choice: int, tokens: Sequence[TokenLogprobs]) -> Mapping[str, Any]:
        return chat_logprobs(tokens)

    def _all_logprobs(self, choice: int) -> Mapping[str, Any]:
        return chat_logprobs(self._logprobs[choice])


class CompletionAnswer(_Answer):
    """The answer to a completion. Choices are numbered by prompt, and then by choice."""

    kind = chunk_kind = "text_completion"
    nothing = unread = {"text": ""}  # noqa: RUF012  never changed

    def __init__(self, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        super().__init__(parsed, facts, answer_id, created)
        self._texts: list[list[str]] = [[] for _ in parsed.requests]
        self._writers: list[CompletionLogprobs | None] = [None] * len(parsed.requests)

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]:
        if not isinstance(event, PromptDelta):
            return super().feed(choice, event)
        self._keep(choice, event.logprobs)
        self._texts[choice].append(event.text)
        return [self._choice_chunk(choice, {"text": event.text}, None, self._take_unsent(choice))]

    def _begin(self) -> list[tuple[int, Part]]:
        return []

    def _take(self, choice: int, delta: TextDelta) -> list[Part]:
        if not delta.text:
            return []
        self._texts[choice].append(delta.text)
        return [{"text": delta.text}]

    def _rest(self, choice: int) -> list[Part]:
        return []

    def _written(self, choice: int) -> Part:
        return {"text": "".join(self._texts[choice])}

    def _next_logprobs(self, choice: int, tokens: Sequence[TokenLogprobs]) -> Mapping[str, Any]:
        writer = self._writers[choice] = self._writers[choice] or self._new_writer(choice)
        return writer.written(tokens)

    def _all_logprobs(self, choice: int) -> Mapping[str, Any]:
        return self._new_writer(choice).written(self._logprobs[choice])

    def _new_writer(self, choice: int) -> CompletionLogprobs:
        request = self._parsed.requests[choice]
        return CompletionLogprobs(self._texts[choice][0] if request.echo else None, request.logprobs or 0)


# A time in the year 9999, but before the last day, because that day overflows in other time zones.
FOREVER_S: Final = 253_370_764_800.0


def created_of(model: Mapping[str, Any]) -> int:
    """Return the Unix time in an entry of /v1/models, or 0 if the entry has no valid time."""
    created = model.get("created")
    return created if type(created) is int and 0 <= created < FOREVER_S else 0


def models_body(models: Sequence[objects.Model]) -> objects.Models:
    """Return the body of /v1/models that lists the bodies of the models."""
    return {"object": "list", "data": [*models]}


def unloaded_model_body(name: str, created: int) -> objects.Model:
    """Return the body of /v1/models/{id} for a model that is not loaded. `created` is a Unix time in seconds."""
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}


def model_body(facts: ModelFacts, created: int) -> objects.Model:
    """Return the body of /v1/models/{id} for a loaded model.

    `max_model_len` is vLLM's name for the size of the context, and `meta` is llama-server's object. The last three
    fields are specific to llmrun. Two servers return the same answers if these fields and the context sizes are equal.
    """
    info = facts.info
    sampling = {name: getattr(facts.default_sampling, name) for name in SAMPLING}
    return {
        **unloaded_model_body(facts.name, created),
        "max_model_len": info.context_size,
        "meta": {
            "n_ctx": info.context_size,
            "n_ctx_train": info.train_context,
            "n_vocab": info.vocabulary_size,
            "n_params": info.parameters,
            "size": info.file_bytes,
            "ftype": info.file_type,
        },
        "system_fingerprint": facts.fingerprint,
        "default_sampling": sampling,
        "batch_invariant": info.batch_invariant,
        "architecture": {
            "input_modalities": ["text", "image"] if facts.sees_images else ["text"],
            "output_modalities": ["text"],
        },
    }
