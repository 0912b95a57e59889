"""Facts, events and official models for tests of the wire formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import structs
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from llmrun.base.types import FinishReason, Timings, TokenLogprob
from llmrun.engine.requests import Event, Finished, ModelFacts, TextDelta, TokenLogprobs, ToolCallDelta
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.protocol.errors import parse_json
from llmrun.serving.protocol.llama_server import (
    LlamaServerAnswer,
    ParsedGeneration,
    parse_infill,
    parse_llama_completion,
)
from llmrun.serving.protocol.openai.requests import ParsedCompletion, parse_chat, parse_completion
from llmrun.serving.protocol.openai.responses import ChatAnswer, CompletionAnswer
from llmrun.serving.protocol.parsed import ApiAnswer
from tests.support.serving.fake_model import FACTS as FAKE

# llama.vim sends this request for a completion, and adds the texts around the cursor.
EDITOR: dict[str, Any] = {
    "id_slot": 0,
    "input_extra": [{"filename": "a.py", "text": "x = 1\n"}],
    "prompt": "    re",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "truncated"],
}
FACTS = structs.replace(
    FAKE,
    name="tiny",
    takes_tools=True,
    thinks=True,
    end_tokens=(2, 3),
    default_sampling=SamplingParams(temperature=0.6),
    fingerprint="fp_1",
)
SEED = 99  # of calls that set none
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def sent(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body after its way through JSON."""
    return parse_json(json.dumps(body).encode())


def chat(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedCompletion:
    return parse_chat(sent({"model": "tiny", "messages": [USER], **fields}), facts, SEED)


def completion(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedCompletion:
    return parse_completion(sent({"model": "tiny", "prompt": "Hi", **fields}), facts, SEED)


def infill(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedGeneration:
    return parse_infill(sent({"input_prefix": "a", "input_suffix": "b", **fields}), facts, SEED)


def llama_completion(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedGeneration:
    return parse_llama_completion(sent({"prompt": "Hi", **fields}), facts, SEED)


def infill_answer(**fields: Any) -> LlamaServerAnswer:
    return LlamaServerAnswer(infill(seed=5, **fields), FACTS, "infill-1", 1_700_000_000)


def chat_answer(**fields: Any) -> ChatAnswer:
    return ChatAnswer(chat(seed=5, **fields), FACTS, "chatcmpl-1", 1_700_000_000)


def completion_answer(**fields: Any) -> CompletionAnswer:
    return CompletionAnswer(completion(seed=5, **fields), FACTS, "cmpl-1", 1_700_000_000)


def said(text: str = "", **fields: Any) -> TextDelta:
    return TextDelta(0, text, (1,), **fields)


def called(*pieces: ToolCallDelta) -> TextDelta:
    return TextDelta(0, "", (1,), tool_calls=pieces)


def ended(reason: FinishReason = FinishReason.STOP, *, thinking: int = 0, **counts: Any) -> Finished:
    known: dict[str, Any] = {"prompt_tokens": 10, "cached_tokens": 4, "generated_tokens": 3, **counts}
    times = Timings(load_s=0.0, prefill_s=0.3, ttft_s=0.5, decode_s=0.2, total_s=0.7, **known)
    return Finished(0, reason, None, 13, times, thinking)


def chosen(text: bytes, logprob: float = -0.5, *others: tuple[bytes, float]) -> TokenLogprobs:
    top = tuple(TokenLogprob(number, *other) for number, other in enumerate(others))
    return TokenLogprobs(TokenLogprob(0, text, logprob), top)


def run(answer: ApiAnswer, events: Sequence[tuple[int, Event]]) -> list[dict[str, Any]]:
    """Feed the events, and return all chunks of the stream after their way through JSON."""
    chunks = [chunk for choice, event in events for chunk in answer.feed(choice, event)]
    return [as_json(chunk) for chunk in [*chunks, *answer.finish()]]


def whole(answer: ChatAnswer | CompletionAnswer, events: Sequence[tuple[int, Event]]) -> dict[str, Any]:
    """Feed the events, and return the body."""
    for choice, event in events:
        answer.feed(choice, event)
    return answer.whole()


def as_json(body: Any) -> Any:
    return json.loads(json.dumps(body, allow_nan=False))


def assembled(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the body that OpenAI's client makes of a stream of chat chunks."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    return state.current_completion_snapshot.to_dict()


def extras(model: object, place: str = "") -> Iterator[str]:
    """Yield the fields of a body, at any depth, that OpenAI's models do not declare."""
    if isinstance(model, list):
        for item in model:
            yield from extras(item, place)
    if isinstance(model, BaseModel):
        yield from (f"{place}{name}" for name in model.model_extra or {})
        for name in type(model).model_fields:
            yield from extras(getattr(model, name), f"{place}{name}.")


def official_chat(body: dict[str, Any]) -> ChatCompletion:
    """Validate the body of a chat completion, of which only the documented additions may be unknown."""
    model = ChatCompletion.model_validate(as_json(body), strict=True)
    assert {*extras(model)} <= {"seed", "timings", "choices.message.reasoning_content"}
    return model


def official_chunk(chunk: dict[str, Any]) -> ChatCompletionChunk:
    model = ChatCompletionChunk.model_validate(as_json(chunk), strict=True)
    assert {*extras(model)} <= {"seed", "timings", "choices.delta.reasoning_content"}
    return model


def official_completion(body: dict[str, Any]) -> Completion:
    model = Completion.model_validate(as_json(body), strict=True)
    assert {*extras(model)} <= {"seed", "timings"}
    return model
