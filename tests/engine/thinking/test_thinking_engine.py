"""Tests that thinking is separate from the answer, can be switched and limited, and does not affect determinism."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Finished, Request, TextDelta, TextPrompt
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.scripted_models import DRAWN, GREEDY, endless
from tests.support.engine.thinking_models import (
    ANSWER,
    CHANNEL_TOKENS,
    CHANNELS,
    ENDED,
    OPENED,
    SWITCHED,
    THOUGHT,
    TURN,
    thinking_backend,
)

pytestmark = pytest.mark.usefixtures("shared_processes")

QUESTION = ChatPrompt([{"role": "user", "content": "Is it so?"}])
ASK = Request(QUESTION, sampling=GREEDY)


def answered(backend: ScriptedBackend, request: Request = ASK, **options: object) -> Gathered:
    [gathered] = answer_all(Engine(backend, **options), [request])  # type: ignore[arg-type]
    return gathered


# --- separating thinking from the answer


@pytest.mark.parametrize("template", [SWITCHED, OPENED])
def test_thinking_is_told_apart_whoever_opens_it(template: str) -> None:
    gathered = answered(thinking_backend(template))
    assert (gathered.reasoning, gathered.text) == (THOUGHT, ANSWER)
    assert gathered.finished.reason is FinishReason.STOP


def test_tags_that_are_control_tokens_are_tags_and_their_letters_are_text() -> None:
    script = [(TURN, "<think>\nso: hm</think>\n\nYes.")]
    gathered = answered(thinking_backend(SWITCHED, control_tokens=("<think>", "</think>"), script=script))
    assert (gathered.reasoning, gathered.text) == ("so: hm", "Yes.")
    letters = [(TURN, "<\x00think>Yes.")]
    backend = thinking_backend(SWITCHED, control_tokens=("<think>", "</think>"), script=letters)
    assert answered(backend).text == "<\x00think>Yes."


def test_a_control_token_that_is_no_tag_where_it_stands_is_shown_as_it_is_spelled() -> None:
    script = [(TURN, "A <think> is a tag.")]
    gathered = answered(thinking_backend(SWITCHED, control_tokens=("<think>", "</think>"), script=script))
    assert (gathered.reasoning, gathered.text) == ("", "A <think> is a tag.")


def test_messages_of_channels() -> None:
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|im_end|>"
    backend = thinking_backend(CHANNELS, control_tokens=CHANNEL_TOKENS, script=[("so?<|end|><|start|>assistant", said)])
    gathered = answered(backend)
    assert (gathered.reasoning, gathered.text) == ("hm", "Yes.")


def test_the_catalogue_knows_the_tags_of_a_template_that_does_not_tell() -> None:
    script = [(TURN, "[[hm]]Yes.")]
    assert answered(thinking_backend(None, script=script), thinking_tags=("[[", "]]")).reasoning == "hm"
    assert answered(thinking_backend(None, script=script)).text == "[[hm]]Yes."


def test_what_is_closed_but_never_opened_is_told() -> None:
    backend = thinking_backend(SWITCHED, script=[(TURN, f"hm{ENDED}Yes.")])
    gathered = answered(backend)
    assert (gathered.reasoning, gathered.text) == ("hm\n", "Yes.")
    thinking = len(f"hm{ENDED}") - 2  # the split is known at the last character of the tag
    assert gathered.finished.thinking_tokens == thinking


def test_a_raw_prompt_gives_out_everything_as_it_is() -> None:
    request = structs.replace(ASK, prompt=TextPrompt(TURN))
    assert answered(thinking_backend(SWITCHED), request).text == f"<think>\n{THOUGHT}{ENDED}{ANSWER}"


# --- token counts and limits


def test_tokens_and_the_first_word_of_the_answer_are_counted() -> None:
    gathered = answered(thinking_backend(OPENED))
    finished = gathered.finished
    assert finished.thinking_tokens == len(THOUGHT) + len("\n</think>")
    assert finished.timings.ttft_s < finished.first_answer_s < finished.timings.total_s
    plain = answered(thinking_backend(None, script=[(TURN, "Yes.")])).finished
    assert (plain.thinking_tokens, plain.first_answer_s) == (0, plain.timings.ttft_s)


def test_stop_strings_are_for_the_answer_and_max_tokens_for_both() -> None:
    gathered = answered(thinking_backend(), structs.replace(ASK, stop=("it is", "see")))
    assert (gathered.reasoning, gathered.text, gathered.finished.stop) == (THOUGHT, "Yes, `</think>` ", "it is")
    gathered = answered(thinking_backend(), structs.replace(ASK, max_tokens=len("<think>\nhm,")))
    assert (gathered.reasoning, gathered.text) == ("hm,", "")
    assert (gathered.finished.reason, gathered.finished.first_answer_s) == (FinishReason.LENGTH, 0.0)


# --- the switch


def test_the_template_is_told() -> None:
    gathered = answered(thinking_backend(SWITCHED), structs.replace(ASK, think=False))
    assert (gathered.reasoning, gathered.text) == ("", ANSWER)
    assert answered(thinking_backend(SWITCHED), structs.replace(ASK, think=True)).reasoning == THOUGHT
    prompt = structs.replace(QUESTION, template_kwargs={"enable_thinking": True})
    assert answered(thinking_backend(SWITCHED), structs.replace(ASK, prompt=prompt, think=False)).reasoning == THOUGHT


@pytest.mark.parametrize("request_", [structs.replace(ASK, think=False), structs.replace(ASK, think_budget=0)])
def test_where_the_template_knows_no_switch_thinking_is_closed_in_the_prompt(request_: Request) -> None:
    backend = thinking_backend(OPENED)
    gathered = answered(backend, request_)
    assert (gathered.reasoning, gathered.text) == ("", ANSWER)
    assert "".join(map(chr, backend.kv.sequences[0])).partition(TURN)[2].startswith(f"<think>\n{ENDED}")
    tags = ("<think>", "</think>")
    gathered = answered(thinking_backend(None), request_, thinking_tags=tags)
    assert (gathered.reasoning, gathered.text) == ("", ANSWER)


def test_thinking_asked_of_a_model_that_knows_none_is_refused() -> None:
    engine = Engine(thinking_backend(None))
    with pytest.raises(UsageError, match="thinking cannot be switched on"):
        engine.submit(structs.replace(ASK, think=True))
    assert engine.idle
    always_thinks = thinking_backend(OPENED)
    assert answered(always_thinks, structs.replace(ASK, think=True)).reasoning == THOUGHT


def test_past_thinking_is_handed_to_the_template_which_decides_what_becomes_of_it() -> None:
    template = SWITCHED.replace(" and loop.last", "")
    past = [
        *QUESTION.messages,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
        {"role": "user", "content": "Sure?"},
    ]
    backend = thinking_backend(template)
    answered(backend, structs.replace(ASK, prompt=ChatPrompt(past)))
    assert "<think>\nhm\n</think>\n\nYes." in "".join(map(chr, backend.kv.sequences[0]))
    forgetful = thinking_backend(SWITCHED)
    answered(forgetful, structs.replace(ASK, prompt=ChatPrompt(past)))
    assert "hm\n" not in "".join(map(chr, forgetful.kv.sequences[0])).rpartition("Sure?")[0]


# --- the budget


def test_thinking_ends_after_as_many_tokens() -> None:
    gathered = answered(thinking_backend(), structs.replace(ASK, think_budget=6))
    assert (gathered.reasoning, gathered.text) == ("hm, l", ANSWER)  # a newline is the first of the six
    assert gathered.finished.thinking_tokens == 6 + len("\n</think>")
    assert answered(thinking_backend(), structs.replace(ASK, think_budget=10_000)).reasoning == THOUGHT
    assert answered(thinking_backend(None), structs.replace(ASK, think_budget=6)).finished.thinking_tokens == 0


@pytest.mark.push
def test_a_tag_that_the_model_is_just_writing_is_not_cut() -> None:
    for budget in range(len(THOUGHT) + 1, len(THOUGHT) + 10):
        gathered = answered(thinking_backend(OPENED), structs.replace(ASK, think_budget=budget))
        assert (gathered.reasoning, gathered.text) == (THOUGHT, ANSWER)


def test_a_budget_holds_for_all_stretches_of_thinking_together() -> None:
    tag = "<|channel|>analysis<|message|>"
    closed = "<|end|><|start|>assistant<|channel|>final<|message|>"
    script = [("so?<|end|><|start|>assistant", tag + "hmhmhm"), (closed, "Yes.")]
    backend = thinking_backend(CHANNELS, control_tokens=CHANNEL_TOKENS, script=script)
    gathered = answered(backend, structs.replace(ASK, think_budget=4))
    assert (gathered.reasoning, gathered.text) == ("hmhm", "Yes.")


@pytest.mark.parametrize("budget", [0, 4])
def test_a_model_that_begins_to_think_again_each_time_is_ended_once(budget: int) -> None:
    script = [(TURN, "<think>hmhmhmhm"), (ENDED, "<think>hm</think>")]
    gathered = answered(
        thinking_backend(SWITCHED, script=script), structs.replace(ASK, think_budget=budget, max_tokens=200)
    )
    assert gathered.finished.reason is FinishReason.STOP
    assert (gathered.reasoning, gathered.text) == ("hmhm"[:budget], "<think>hm</think>")


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="think_budget: -1"):
        Engine(thinking_backend()).submit(structs.replace(ASK, think_budget=-1))


def noise(backend: ScriptedBackend, rows_per_step: int, budgets: list[int | None]) -> list[Gathered]:
    """Return answers of a model that begins to think and then emits random tokens."""
    engine = Engine(backend, rows_per_step=rows_per_step)
    return answer_all(
        engine,
        [
            endless(structs.replace(ASK, think_budget=budget, max_tokens=80, sampling=replace(DRAWN, seed=3)))
            for budget in budgets
        ],
    )


@pytest.mark.push
def test_the_answer_does_not_depend_on_the_batch_or_the_chunk() -> None:
    script = [("a cue that never comes", "")]
    budgets: list[int | None] = [None, 5, 5, 17]
    alone = [noise(thinking_backend(OPENED, script=script), 256, [budget])[0] for budget in budgets]
    assert alone[1].tokens != alone[3].tokens
    for rows_per_step, together in product((1, 7, 256), (2, 4)):
        backend = thinking_backend(OPENED, script=script, max_sequences=together)
        gathered = noise(backend, rows_per_step, budgets)
        assert [one.tokens for one in gathered] == [one.tokens for one in alone]
        assert [(one.reasoning, one.text) for one in gathered] == [(one.reasoning, one.text) for one in alone]


def test_text_may_be_given_out_with_the_end_alone() -> None:
    engine = Engine(thinking_backend(None, script=[(TURN, "Yes.<thi")]), thinking_tags=("<think>", "</think>"))
    events = list(engine.generate(structs.replace(ASK, max_tokens=8)))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Yes.<thi"
    assert isinstance(events[-1], Finished)
