"""Tests that our server understands what our client sends, and our client what our server answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import schema_of
from llmrun.engine.remote.request import remote_request
from llmrun.engine.remote.stream import Chunk, Teller, read_chunks
from llmrun.engine.requests import (
    ChatPrompt,
    Event,
    FillPrompt,
    ModelFacts,
    Request,
    TextPrompt,
    TokenPrompt,
    ToolCallDelta,
)
from llmrun.options.sampling_params import SAMPLING, SamplingParams
from llmrun.serving.protocol.errors import parse_json
from llmrun.serving.protocol.openai.requests import ParsedCompletion, parse_chat, parse_completion
from tests.support.protocol.answers import (
    FACTS,
    SEED,
    TOOL,
    USER,
    called,
    chat_answer,
    chosen,
    completion_answer,
    ended,
    run,
    said,
)
from tests.support.serving.pictures import BLUE, RED, key_of, part_of

CHAT = ChatPrompt((USER,))
LOWEST: dict[str, Any] = {
    name: each.minimum if math.isfinite(each.minimum) else each.default for name, each in SAMPLING.items()
}
SAMPLED = SamplingParams(**LOWEST, logit_bias={5: -math.inf, 6: 2.5}, seed=2**64 - 1)


def received(request: Request, *, ignore_eos: bool = False, facts: ModelFacts = FACTS) -> ParsedCompletion:
    """Return what our server reads of what our client sends."""
    wire = remote_request(request, "tiny", ignore_eos=ignore_eos)
    body = parse_json(json.dumps({**wire.body, **wire.extras}).encode())
    parsed = (parse_completion if wire.path == "/completions" else parse_chat)(body, facts, SEED)
    assert (parsed.stream, parsed.include_usage, parsed.n, parsed.ignored) == (True, True, 1, ())
    return parsed


def test_images_arrive_as_they_were_sent() -> None:
    content = [part_of(RED), {"type": "text", "text": "and"}, part_of(BLUE, detail="high")]
    result = {"role": "tool", "tool_call_id": "a", "content": [part_of(BLUE)]}
    messages = ({"role": "user", "content": content}, {"role": "assistant", "content": "Two."}, result)
    sent = ChatPrompt(messages, images={key_of(RED): RED, key_of(BLUE): BLUE})
    prompt = received(Request(sent), facts=structs.replace(FACTS, sees_images=True)).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert ([*prompt.messages], prompt.images) == ([*messages], sent.images)
    with pytest.raises(UsageError, match="images are not supported in raw prompts"):
        remote_request(Request(TextPrompt("<__media__>", (RED,))), "tiny", ignore_eos=False)


@pytest.mark.parametrize(
    "request_",
    [
        Request(CHAT),
        Request(TextPrompt("Hi")),
        Request(TokenPrompt((1, 2))),
        Request(FillPrompt("a", "b"), 5),
        Request(CHAT, 5, ("a", "b"), SAMPLED, 3),
        Request(TextPrompt("Hi"), 5, ("a",), SAMPLED, 3),
        Request(CHAT, think=False),
        Request(CHAT, think=True),
        Request(CHAT, response_format=ResponseFormat(FormatKind.JSON_OBJECT)),
        Request(ChatPrompt((USER,), [TOOL], "look", False)),
        Request(ChatPrompt((USER,), [TOOL], "required", template_kwargs={"x": 1})),
    ],
    ids=range(11),
)
def test_requests_survive_the_way_to_our_server(request_: Request) -> None:
    (found,) = received(request_).requests
    prompt = found.prompt
    if isinstance(prompt, ChatPrompt):
        variables = {"enable_thinking": found.think, "thinking": found.think} if found.think is not None else {}
        assert isinstance(request_.prompt, ChatPrompt)
        assert prompt.template_kwargs == {**variables, **request_.prompt.template_kwargs}
        found = structs.replace(found, prompt=structs.replace(prompt, template_kwargs=request_.prompt.template_kwargs))
    assert found == request_


def test_schemas_survive_the_way_to_our_server() -> None:
    wanted = ResponseFormat(
        FormatKind.JSON_SCHEMA, '{"type": "object", "properties": {"ä": {}}}', origin="--json-schema"
    )
    found = received(Request(CHAT, response_format=wanted)).requests[0].response_format
    assert found is not None
    assert schema_of(found) == schema_of(wanted)


def test_ignored_end_tokens_survive_the_way_to_our_server() -> None:
    assert received(Request(CHAT), ignore_eos=True).requests[0].sampling.logit_bias == {2: -math.inf, 3: -math.inf}


def test_only_sent_parameters_replace_the_model_s() -> None:
    request = Request(CHAT, sampling=SamplingParams(temperature=0.1, top_k=3), sent_sampling=frozenset({"top_k"}))
    sampling = received(request).requests[0].sampling
    assert (sampling.top_k, sampling.temperature) == (3, FACTS.default_sampling.temperature)


def read(chunks: Sequence[dict[str, Any]]) -> list[Chunk]:
    """Return what our client reads of a stream."""
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]
    return [*read_chunks(((0.0, line) for line in lines), Teller("host", None))]


def of(*events: Event) -> list[tuple[int, Event]]:
    return [(0, event) for event in events]


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def test_chats_survive_the_way_to_our_client() -> None:
    answer = chat_answer(**STREAMED, tools=[TOOL], logprobs=True, top_logprobs=1)
    likely = chosen(b"\xe2\x82", -0.5, (b"\xe2\x82", -0.5))
    events = of(
        said(reasoning="Hm"),
        said("So", logprobs=(likely,)),
        called(ToolCallDelta(0, "call_a", "look", "{")),
        called(ToolCallDelta(0, arguments="}")),
        ended(FinishReason.TOOL_CALLS, thinking=2),
    )
    chunks = read(run(answer, events))
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm"
    assert "".join(chunk.text for chunk in chunks) == "So"
    pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
    assert pieces == [ToolCallDelta(0, "call_a", "look", "{"), ToolCallDelta(0, arguments="}")]
    [(token, top)] = [pair for chunk in chunks for pair in chunk.logprobs]
    assert (token.text, token.logprob, [each.text for each in top]) == (b"\xe2\x82", -0.5, [b"\xe2\x82"])
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["tool_calls"]
    usage = chunks[-1].usage
    assert usage is not None
    counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens
    assert counts == (10, 4, 3, 2)


def test_completions_survive_the_way_to_our_client() -> None:
    answer = completion_answer(**STREAMED, logprobs=1)
    events = of(said("Hi", logprobs=(chosen(b"Hi", -0.5, (b"Ho", -0.25)),)), ended(FinishReason.LENGTH))
    chunks = read(run(answer, events))
    assert "".join(chunk.text for chunk in chunks) == "Hi"
    [(token, top)] = [pair for chunk in chunks for pair in chunk.logprobs]
    assert (token.text, token.logprob) == (b"Hi", -0.5)
    assert [each.text for each in top] == [b"Ho", b"Hi"]
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["length"]
