"""Tests of answers with tools, from the prompt to the calls, on the scripted backend with real templates."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.cli.answers.answering import CollectedCalls
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.engine import Engine
from llmrun.engine.requests import DEFERRED, ChatPrompt, Request, ToolCall
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.contract import forget_all
from tests.support.engine.drafts import PROPOSALS, adversary, answer_plainly, assert_same, drafting_engine
from tests.support.engine.scripted_models import GREEDY
from tests.support.engine.thinking_models import SWITCHED, thinking_backend
from tests.support.tool_calls.formats import WITH_FORMATS, real_case, source_of
from tests.support.tool_calls.random_tools import random_tools

pytestmark = [pytest.mark.push, pytest.mark.usefixtures("shared_processes")]

# Control tokens, texts and items; with thinking, with one call per answer, with headers, with ids.
NAMES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "openai-gpt-oss-120b",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "GLM-4.6",
    "deepseek-ai-DeepSeek-V3.2",
    "moonshotai-Kimi-K2",
    "LFM2-8B-A1B",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
)
QUESTION = [{"role": "user", "content": "Is it so?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
THINKING = ("<think>", "</think>")
QWEN = ("<tool_call>", "</tool_call>", *THINKING)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOSING = dict.fromkeys(map(ord, '"}])0>'), 5.0)


def backend_for(name: str, script: str | None = None) -> ScriptedBackend:
    """Return a model with this template that says the script, which begins after an empty thinking block, or noise."""
    tokenizer = real_case(name).tokenizer
    controls = tuple(tokenizer.token_text(token) for token in range(256, tokenizer.vocabulary_size))
    begins = "assistant\n" if script is not None and script.startswith("<think>") else "</think>\n\n"
    voice = None if script is None else scripted_answers([(begins, script)], controls)
    return ScriptedBackend(voice, chat_template=source_of(name), control_tokens=controls)


def qwen(script: str) -> ScriptedBackend:
    return backend_for("Qwen-Qwen3-0.6B", script)


def request_with(tools: list[dict[str, Any]], choice: str = "auto", *, seed: int = 0, **options: Any) -> Request:
    parallel = options.pop("parallel", True)
    prompt = ChatPrompt(QUESTION, tools, tool_choice=choice, parallel_tool_calls=parallel)
    sampling = SamplingParams(seed=seed, logit_bias=CLOSING) if seed else GREEDY
    return Request(prompt, options.pop("max_tokens", 600), sampling=sampling, **options)


def calls_of(gathered: Gathered) -> list[ToolCall]:
    collected = CollectedCalls()
    for delta in gathered.deltas:
        collected.take(delta.tool_calls)
    return collected.calls


def test_the_names_are_those_of_templates() -> None:
    assert set(NAMES) <= set(WITH_FORMATS)


@pytest.mark.night
@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_match_their_schemas(name: str) -> None:
    """A model that generates noise calls random tools with valid arguments, with drafts and without."""
    ended = 0
    for seed in range(1, 9):
        tools = random_tools(Random(seed))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        request = request_with(tools, "required", seed=seed, think=False if seed % 2 else None, think_budget=9)
        backend = backend_for(name)
        known = answer_plainly(Engine(backend), [request])
        [plain] = [one.gathered for one in known]
        forget_all(backend)
        [gathered] = answer_all(drafting_engine(backend, adversary(backend, PROPOSALS["mixed"], known)), [request])
        assert_same(gathered, plain)
        if plain.finished.reason is FinishReason.LENGTH:
            continue
        ended += 1
        assert plain.finished.reason is FinishReason.TOOL_CALLS
        assert plain.text == ""
        for call in calls_of(plain):
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert ended >= 4


@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
def test_a_call_follows_thinking_and_text(choice: str) -> None:
    text = "" if choice != "auto" else "Let me see.\n"
    backend = qwen(f"<think>\nhm\n</think>\n\n{text}{CALL}<|im_end|>")
    [gathered] = answer_all(Engine(backend), [request_with([WEATHER], choice)])
    assert (gathered.reasoning, gathered.text) == ("hm", text.strip())
    [call] = calls_of(gathered)
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    assert gathered.finished.reason is FinishReason.TOOL_CALLS


def test_arguments_arrive_in_pieces() -> None:
    [gathered] = answer_all(Engine(qwen(f"{CALL}<|im_end|>")), [request_with([WEATHER], think=False)])
    pieces = [delta for one in gathered.deltas for delta in one.tool_calls]
    assert pieces[0].name == "weather"
    assert pieces[0].id
    assert len(pieces) > 3
    assert "".join(piece.arguments for piece in pieces) == '{"city": "Oslo"}'


def test_the_same_answer_has_the_same_ids_except_in_later_turns() -> None:
    backend = qwen(f"{CALL}<|im_end|>")
    first, again = (
        calls_of(answer_all(Engine(backend), [request_with([WEATHER], think=False)])[0])[0] for _ in range(2)
    )
    assert first == again
    later = [*QUESTION, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
    [gathered] = answer_all(Engine(backend), [Request(ChatPrompt(later, [WEATHER]), 100, sampling=GREEDY, think=False)])
    assert calls_of(gathered)[0].id != first.id


def test_no_call_with_tool_choice_none() -> None:
    [gathered] = answer_all(Engine(qwen(f"Hm. {CALL}<|im_end|>")), [request_with([WEATHER], "none", think=False)])
    assert calls_of(gathered) == []
    assert gathered.text.startswith("Hm. ")
    assert gathered.finished.reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_calls_are_a_choice(parallel: bool) -> None:
    backend = qwen(f"{CALL}\n{CALL}<|im_end|>")
    [gathered] = answer_all(Engine(backend), [request_with([WEATHER], think=False, parallel=parallel)])
    assert len(calls_of(gathered)) == (2 if parallel else 1)


@pytest.mark.parametrize("most", [8, 20, 40])
def test_a_call_that_is_cut_off_is_no_call(most: int) -> None:
    request = request_with([WEATHER], think=False, max_tokens=most)
    [gathered] = answer_all(Engine(qwen(f"{CALL}<|im_end|>")), [request])
    assert gathered.finished.reason is FinishReason.LENGTH
    assert calls_of(gathered) == []


def test_deferred_tools_are_called_although_the_prompt_does_not_list_them() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    engine = Engine(qwen(f"{CALL}<|im_end|>"))
    request = request_with([other, {**WEATHER, DEFERRED: True}], think=False)
    [gathered] = answer_all(engine, [request])
    assert [call.name for call in calls_of(gathered)] == ["weather"]
    assert engine.prompt_tokens(request) == engine.prompt_tokens(request_with([other], think=False))


def test_results_reach_the_prompt() -> None:
    call = ToolCall("call_1", "weather", '{"city": "Oslo"}')
    messages: list[dict[str, Any]] = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call.as_message()]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain <|im_end|>"},
    ]
    backend = qwen("Yes.<|im_end|>")
    engine = Engine(backend)
    request = Request(ChatPrompt(messages, [WEATHER]), 50, sampling=GREEDY, think=False)
    answer_all(engine, [request])
    prompt = [token for batch in backend.batches for token in batch.tokens.tolist()][: engine.prompt_tokens(request)]
    text = b"".join(backend.tokenizer.token_bytes(token) for token in prompt).decode()
    assert '"arguments": {"city": "Oslo"}' in text
    assert "Rain <|im_end|>" in text  # as text: control tokens have no bytes


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (ChatPrompt(QUESTION, [WEATHER, WEATHER]), "two tools have the same name: weather"),
        (ChatPrompt(QUESTION, [WEATHER], tool_choice="other"), "no such tool: other"),
        (ChatPrompt(QUESTION, [{"type": "function"}]), "number 1 has no function with a name"),
        (
            ChatPrompt([*QUESTION, {"role": "tool", "tool_call_id": "x", "content": ""}]),
            "tool result without a call: x",
        ),
    ],
)
def test_invalid_tools_are_refused(prompt: ChatPrompt, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Engine(qwen("")).submit(Request(prompt))


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder"])
@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": r"\bfoo\b"},
        {"pattern": r"^(a)\1$"},
        {"pattern": "^{id}$"},
        {"pattern": "^https?://"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "str"},
        {"properties": None},
    ],
)
def test_a_tool_that_cannot_be_enforced_does_not_stop_the_others(name: str, schema: dict[str, Any]) -> None:
    other = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    tools = [WEATHER, {"type": "function", "function": {"name": "other", "parameters": other}}]
    [gathered] = answer_all(Engine(backend_for(name)), [request_with(tools, "weather", seed=2, think=False)])
    if gathered.finished.reason is FinishReason.TOOL_CALLS:
        [call] = calls_of(gathered)
        assert isinstance(json.loads(call.arguments)["city"], str)


def test_a_strict_tool_is_refused_by_name() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    strict = {"name": "other", "strict": True, "parameters": parameters}
    with pytest.raises(UsageError, match=r'tool other: .*"uniqueItems" is not supported'):
        Engine(qwen("")).submit(request_with([WEATHER, {"type": "function", "function": strict}]))


def test_tools_need_a_template_with_tools() -> None:
    with pytest.raises(UsageError, match="tools cannot be used: this model's chat template does not support tools"):
        Engine(thinking_backend(SWITCHED)).submit(request_with([WEATHER]))


def test_tools_exclude_a_format_unless_no_call_is_allowed() -> None:
    wanted = ResponseFormat(FormatKind.CHOICE, choices=("yes",))
    engine = Engine(qwen(""))
    with pytest.raises(UsageError, match="tools and a response format cannot be combined"):
        engine.submit(request_with([WEATHER], response_format=wanted))
    [gathered] = answer_all(engine, [request_with([WEATHER], "none", think=False, response_format=wanted)])
    assert gathered.text == "yes"
