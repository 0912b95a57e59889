"""Tests of answers with a response format, on the scripted backend."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend, ScriptedTokenizer, scripted_answers
from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.constraint.answer import AnswerConstraint
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import ConstraintCompiler
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request, TextPrompt
from llmrun.engine.thinking import ThinkingDecoder
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.contract import forget_all
from tests.support.engine.drafts import PROPOSALS, Place, adversary, answer_plainly, assert_same, drafting_engine
from tests.support.engine.scripted_models import DRAWN, GREEDY, noisy, random_prompt
from tests.support.engine.thinking_models import CHANNEL_TOKENS, CHANNELS, OPENED, SWITCHED, answers, thinking_backend
from tests.support.tiers import examples

pytestmark = pytest.mark.usefixtures("shared_processes")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["cats", "catfish", "dogs"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
JSON = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(PERSON))
FORMATS = (
    JSON,
    ResponseFormat(FormatKind.JSON_OBJECT),
    ResponseFormat(FormatKind.REGEX, r"[A-Z][a-z]{2,9} \d{4}(, approximately)?"),
    ResponseFormat(FormatKind.CHOICE, choices=("yes", "no", "yes, but later", 'say "no"', "ünïcode 🙂")),
    ResponseFormat(FormatKind.GRAMMAR, 'start: greeting ", " /[a-z]{1,9}/ "!"\ngreeting: "hello" | "good morning"'),
    ResponseFormat(FormatKind.GRAMMAR, 'root ::= ("go" | "stop") [0-9] [0-9]?'),
)
CLOSING = {ord(character): 6.0 for character in '"}]0'}  # JSON objects would otherwise grow without end


def has_format(text: str, wanted: ResponseFormat) -> bool:
    if wanted.kind is FormatKind.JSON_SCHEMA:
        found = json.loads(text)
        return list(found) == ["name", "age", "likes"] and len(found["name"]) <= 12 and 0 <= found["age"] <= 120
    if wanted.kind is FormatKind.JSON_OBJECT:
        return isinstance(json.loads(text), dict)
    if wanted.kind is FormatKind.CHOICE:
        return text in wanted.choices
    patterns = {
        FORMATS[2]: FORMATS[2].text,
        FORMATS[4]: "(hello|good morning), [a-z]{1,9}!",
        FORMATS[5]: "(go|stop)[0-9]{1,2}",
    }
    return re.fullmatch(patterns[wanted], text) is not None


def formatted(wanted: ResponseFormat, seed: int = 0, **options: object) -> Request:
    request = Request(random_prompt(9, seed), 200, sampling=replace(DRAWN, seed=seed, logit_bias=CLOSING))
    return structs.replace(request, response_format=wanted, **options)


def check(gathered: Gathered, wanted: ResponseFormat) -> None:
    """Check that an answer that ended by itself has its format."""
    if gathered.finished.reason is FinishReason.STOP:
        assert has_format(gathered.text, wanted), gathered.text


@pytest.mark.push
@pytest.mark.parametrize("wanted", FORMATS)
def test_answers_have_their_format(wanted: ResponseFormat) -> None:
    found = answer_all(Engine(noisy(max_sequences=4)), [formatted(wanted, seed) for seed in range(30)])
    for gathered in found:
        check(gathered, wanted)
    assert sum(gathered.finished.reason is FinishReason.STOP for gathered in found) > 20


def continued(request: Request, begun: str) -> Request:
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": begun}]
    return structs.replace(request, prompt=ChatPrompt(messages, add_generation_prompt=False))


@pytest.mark.push
@pytest.mark.parametrize("wanted", FORMATS)
def test_continued_answers_have_their_format_as_a_whole(wanted: ResponseFormat) -> None:
    [whole] = answer_all(Engine(noisy()), [formatted(wanted, 1)])
    assert whole.finished.reason is FinishReason.STOP
    for length in range(0, len(whole.text), max(1, len(whole.text) // 8)):
        begun = whole.text[:length]
        requests = [continued(formatted(wanted, seed), begun) for seed in range(3)]
        for found in answer_all(Engine(noisy(max_sequences=3)), requests):
            if found.finished.reason is FinishReason.STOP:
                assert has_format(begun + found.text, wanted), (begun, found.text)


@pytest.mark.parametrize(
    ("wanted", "begun"),
    [
        (JSON, "Here is the JSON: "),
        (JSON, '{"age": 5'),
        (JSON, '{"name": "a", "age": 5, "likes": []}'),
        (ResponseFormat(FormatKind.JSON_OBJECT), "[1"),
        (FORMATS[3], "maybe"),
        (FORMATS[3], "yes, but later"),
    ],
)
def test_beginnings_without_the_format_are_refused(wanted: ResponseFormat, begun: str) -> None:
    with pytest.raises(UsageError, match="the last message is not the beginning of an answer in this format"):
        Engine(noisy()).submit(continued(formatted(wanted), begun))


@pytest.mark.cover(1)
@pytest.mark.push
@pytest.mark.parametrize("name", PROPOSALS)
@pytest.mark.parametrize("wanted", FORMATS)
def test_drafts_do_not_change_formatted_answers(name: str, wanted: ResponseFormat) -> None:
    backend = noisy(max_sequences=3)
    known = answer_plainly(Engine(backend), [formatted(wanted, seed, logprobs=seed) for seed in range(3)])
    forget_all(backend)
    engine = drafting_engine(backend, adversary(backend, PROPOSALS[name], known))
    for gathered, plain in zip(answer_all(engine, [plain.request for plain in known]), known, strict=True):
        assert_same(gathered, plain.gathered)


@pytest.mark.push
@settings(max_examples=examples(40))
@given(st.sampled_from(FORMATS), st.integers(0, 1000), st.sampled_from([None, 3]))
def test_forced_tokens_do_not_change_answers(wanted: ResponseFormat, seed: int, logprobs: int | None) -> None:
    backend, request = noisy(), formatted(wanted, seed, logprobs=logprobs)
    [together] = answer_all(Engine(backend), [request])
    forget_all(backend)
    [one_by_one] = answer_all(Engine(backend, rows_per_step=1), [request])
    assert_same(together, one_by_one)


@pytest.mark.push
@pytest.mark.parametrize(
    "sampling",
    [
        {"mirostat": 1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"mirostat": 2},
        {"adaptive_target": 0.3},
        {"xtc_probability": 1.0, "dry_multiplier": 0.8, "typical_p": 0.9, "top_n_sigma": 2.0},
        {"samplers": "temperature;top_k", "top_k": 5},
    ],
)
@pytest.mark.parametrize("name", ["right, then wrong", "mixed"])
def test_other_samplers_draw_allowed_tokens(sampling: dict[str, Any], name: str) -> None:
    backend = noisy()
    for seed in range(3):
        request = formatted(JSON, seed)
        request = structs.replace(request, sampling=replace(request.sampling, **sampling))
        forget_all(backend)
        known = answer_plainly(Engine(backend), [request])
        check(known[0].gathered, JSON)
        forget_all(backend)
        [gathered] = answer_all(drafting_engine(backend, adversary(backend, PROPOSALS[name], known)), [request])
        assert_same(gathered, known[0].gathered)


def test_forced_tokens_save_steps() -> None:
    [gathered] = answer_all(Engine(noisy()), [formatted(JSON)])
    timings = gathered.finished.timings
    assert timings.forced_tokens > 20
    assert timings.steps + timings.forced_tokens == timings.generated_tokens


@pytest.mark.parametrize(("logprobs", "steps"), [(None, 2), (2, 3)])
def test_forced_tokens_at_both_ends_take_no_step(logprobs: int | None, steps: int) -> None:
    """The first ones run with the prompt. The last ones run only if their log-probabilities are wanted.

    The space before the vowel is drawn, because another vocabulary might have a token for both.
    """
    wanted = ResponseFormat(FormatKind.REGEX, "vowel: [aeiou], that is all")
    [gathered] = answer_all(Engine(noisy()), [formatted(wanted, logprobs=logprobs)])
    assert re.fullmatch("vowel: [aeiou], that is all", gathered.text)
    assert gathered.finished.timings.steps == steps
    assert len(gathered.logprobs) == (len(gathered.tokens) if logprobs else 0)


def test_no_draft_follows_forced_tokens_soon() -> None:
    backend, wanted = noisy(), ResponseFormat(FormatKind.REGEX, "name: [a-z]{20}, city: [a-z]{20}")
    known = answer_plainly(Engine(backend), [formatted(wanted)])
    forget_all(backend)
    drawn: list[int] = []

    def propose(place: Place) -> list[int]:
        answer = next(iter(engine._requests.running))
        drawn.append(answer.drawn_in_a_row if answer.forced_tokens else 2)
        return place.rest[:1]

    engine = drafting_engine(backend, adversary(backend, propose, known))
    [gathered] = answer_all(engine, [formatted(wanted)])
    assert gathered.finished.timings.accepted_tokens > 10
    assert min(drawn) == 2


@pytest.mark.parametrize("most", [1, 2, 9, 20])
def test_a_limit_ends_an_answer_before_its_format(most: int) -> None:
    [gathered] = answer_all(Engine(noisy()), [formatted(JSON, max_tokens=most)])
    assert (gathered.finished.reason, len(gathered.tokens)) == (FinishReason.LENGTH, most)


def test_a_complete_answer_needs_no_end_token() -> None:
    wanted = ResponseFormat(FormatKind.CHOICE, choices=("yes",))
    [gathered] = answer_all(Engine(noisy()), [formatted(wanted)])
    assert (gathered.text, gathered.finished.reason) == ("yes", FinishReason.STOP)
    assert gathered.finished.timings.steps == 1


def test_the_end_is_allowed_only_where_the_format_is_complete() -> None:
    backend = ScriptedBackend(scripted_answers([("go", ""), ("goa", ""), ("goab", "")]))  # it wants to end at once
    wanted = ResponseFormat(FormatKind.REGEX, "a+b+")
    [gathered] = answer_all(Engine(backend), [Request(TextPrompt("go"), 50, sampling=GREEDY, response_format=wanted)])
    assert re.fullmatch("a+b+", gathered.text)
    assert gathered.finished.reason is FinishReason.STOP


@pytest.mark.push
def test_a_vocabulary_may_have_no_end_token() -> None:
    class Endless(ScriptedTokenizer):
        end_of_generation = frozenset()

    tokenizer = Endless(288)  # with the additional end token, the mask has one more word
    compiler = ConstraintCompiler()
    followed = AnswerConstraint(compiler.compile(FORMATS[5], tokenizer), ThinkingDecoder(()), tokenizer)
    compiler.close()
    for token in b"go42":
        assert followed.masks(())[0, token // 32] >> token % 32 & 1
        followed.take(token, 0)
    assert followed.is_complete


# --- thinking

QUESTION = ChatPrompt([{"role": "user", "content": "Is it so?"}])
WANTED = ResponseFormat(FormatKind.CHOICE, choices=("Yes, it is.", "No."))


@pytest.mark.push
@pytest.mark.parametrize("template", [SWITCHED, OPENED])
@pytest.mark.parametrize("budget", [None, 0, 4])
@pytest.mark.parametrize("name", ["nothing", "right", "past the end", "mixed"])
def test_the_format_begins_after_the_thinking(template: str, budget: int | None, name: str) -> None:
    backend = thinking_backend(template)
    request = Request(QUESTION, 120, sampling=GREEDY, think_budget=budget, response_format=WANTED)
    known = answer_plainly(Engine(backend), [request])
    forget_all(backend)
    [gathered] = answer_all(drafting_engine(backend, adversary(backend, PROPOSALS[name], known)), [request])
    assert_same(gathered, known[0].gathered)
    assert gathered.text in WANTED.choices
    assert gathered.finished.reason is FinishReason.STOP
    assert bool(gathered.reasoning) == (budget != 0)


def test_a_model_may_answer_without_thinking() -> None:
    backend = thinking_backend(SWITCHED, script=[("assistant\n", "Yes, it is.")])
    [gathered] = answer_all(Engine(backend), [Request(QUESTION, 120, sampling=GREEDY, response_format=WANTED)])
    assert (gathered.reasoning, gathered.text) == ("", "Yes, it is.")


def test_thinking_that_is_off_stays_off() -> None:
    backend = thinking_backend(SWITCHED)
    request = Request(QUESTION, 120, sampling=GREEDY, think=False, response_format=WANTED)
    [gathered] = answer_all(Engine(backend), [request])
    assert (gathered.reasoning, gathered.text) == ("", "Yes, it is.")


def test_the_answer_does_not_end_while_the_model_thinks() -> None:
    """The model wants to end its answer inside the thinking block, which is not allowed."""
    backend = thinking_backend(OPENED, script=[("<think>\n", "hm"), ("\n</think>\n\n", "No.")])
    request = Request(QUESTION, 400, sampling=GREEDY, think_budget=30, response_format=WANTED)
    [gathered] = answer_all(Engine(backend), [request])
    assert gathered.text == "No."
    assert gathered.reasoning.startswith("hm")


@pytest.mark.parametrize("answer", ["Yes, it is.", "Something else"])
def test_channels_come_before_the_answer(answer: str) -> None:
    script = (
        f"<|channel|>analysis<|message|>Hm 🙂.<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|im_end|>"
    )
    backend = thinking_backend(
        CHANNELS, control_tokens=CHANNEL_TOKENS, script=[("so?<|end|><|start|>assistant", script)]
    )
    [gathered] = answer_all(Engine(backend), [Request(QUESTION, 120, sampling=GREEDY, response_format=WANTED)])
    assert gathered.reasoning == "Hm 🙂."
    assert gathered.text in WANTED.choices


def test_the_final_channel_may_come_first() -> None:
    script = "<|channel|>final<|message|>No.<|im_end|>"
    backend = thinking_backend(
        CHANNELS, control_tokens=CHANNEL_TOKENS, script=[("so?<|end|><|start|>assistant", script)]
    )
    [gathered] = answer_all(Engine(backend), [Request(QUESTION, 120, sampling=GREEDY, response_format=WANTED)])
    assert (gathered.reasoning, gathered.text) == ("", "No.")


def test_thinking_is_free() -> None:
    """Inside the thinking, text is neither masked nor taken for the answer."""
    backend = thinking_backend(SWITCHED, script=answers(thought='{"name": "No.'))
    [gathered] = answer_all(Engine(backend), [Request(QUESTION, 120, sampling=GREEDY, response_format=WANTED)])
    assert gathered.reasoning == '{"name": "No.'


# --- errors


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (ResponseFormat(FormatKind.JSON_SCHEMA, "{"), "not valid JSON"),
        (ResponseFormat(FormatKind.JSON_SCHEMA, "5"), "a schema is an object"),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '{"not": {}}'), "not"),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '{"$ref": "file:///etc/passwd"}'), "cannot be enforced"),
        (ResponseFormat(FormatKind.REGEX, "(a"), "unclosed group"),
        (ResponseFormat(FormatKind.REGEX, "(?=a)b"), "look-around"),
        (ResponseFormat(FormatKind.GRAMMAR, "hello"), "not a GBNF or Lark grammar"),
        (ResponseFormat(FormatKind.GRAMMAR, "root ::= missing"), "not a GBNF or Lark grammar"),
        (ResponseFormat(FormatKind.GRAMMAR, 'start: "a'), "cannot be enforced"),
        (ResponseFormat(FormatKind.CHOICE, choices=("a", "")), "a choice is empty"),
    ],
)
def test_formats_that_cannot_be_enforced_are_refused(wanted: ResponseFormat, words: str) -> None:
    engine = Engine(noisy())
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        engine.submit(formatted(structs.replace(wanted, origin="--flag")))
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("--flag: ")
    assert engine.idle
