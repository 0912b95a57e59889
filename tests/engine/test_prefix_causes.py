"""Tests that reports name the right cause if a prefix is not reused, with real templates and constructed misses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from llmrun.base.types import Adapter
from llmrun.cli.prefix_advice import clients_of, sentences_of
from llmrun.engine.requests import PrefixCause, PrefixReport, Request
from llmrun.engine.templates.chat_template import FAMILIES
from llmrun.model.tokenizers.text_tokenizer import decode_spelled
from llmrun.serving.prefix_log import PrefixLog, Record, reused_words
from tests.support.engine.prefixes import SYSTEM, TOOLS, Talk, chat, tool, turn
from tests.support.engine.thinking_models import CHANNELS
from tests.support.tool_calls.formats import source_of

pytestmark = pytest.mark.push

QWEN, QWEN3, LLAMA, GEMMA = "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "gemma"
LLAMA_3_2, GPT_OSS, HERMES = "meta-llama-Llama-3.2-3B-Instruct", "openai-gpt-oss-120b", "Qwen3-Coder"
DEEPSEEK = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
OWN = {"channels": CHANNELS, "gemma": next(each.source for each in FAMILIES if each.name == "gemma")}
QUESTION = ("user", "Why does the test of the parser fail on Windows, although it passes everywhere else?")
ANSWER = "It compares paths with slashes, but Windows writes backslashes. Use pathlib in the test instead."
LATER = ("user", "Please change it, and show me the difference before you write the file to the disk.")
MORE: Sequence[tuple[str, str]] = [
    QUESTION,
    ("assistant", ANSWER),
    LATER,
    ("assistant", "I changed two lines of the test."),
    ("user", "Go on."),
]
SEARCHED = "src/paths.py:12: path = base + '/' + name\nsrc/paths.py:40: return path.split('/')"


def call(arguments: str, name: str = "search_text") -> Mapping[str, Any]:
    function = {"name": name, "arguments": arguments}
    return turn("assistant", "", tool_calls=[{"id": "call_1", "type": "function", "function": function}])


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


Miss = Callable[[Talk], PrefixReport]


def system_time(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    return talk.ask(chat(*MORE, tools=TOOLS, system=changed(SYSTEM, "16:05", "16:07")))


def system_time_without_tools(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, system=""))
    talk.ask(chat(*MORE))
    return talk.ask(chat(*MORE, system=changed(SYSTEM, "16:05", "16:07")))


def system_and_tools(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    return talk.ask(chat(*MORE, tools=TOOLS[:4], system=changed(SYSTEM, "16:05", "16:07")))


def tool_described(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    new = tool("read_file", "Read a file of the project. 14 files are open, and each error is reported in full.")
    return talk.ask(chat(*MORE, tools=(*TOOLS[:2], new, *TOOLS[3:])))


def tool_added(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    return talk.ask(chat(*MORE, tools=(*TOOLS, tool("ask_user"))))


def tool_added_first(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    return talk.ask(chat(*MORE, tools=(tool("ask_user"), *TOOLS)))


def tool_removed(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    return talk.ask(chat(*MORE, tools=(*TOOLS[:1], *TOOLS[2:])))


def tools_reordered(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    return talk.ask(chat(*MORE, tools=(*TOOLS[:3], TOOLS[4], TOOLS[3])))


def message_changed(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE))
    asked = changed(LATER[1], "two" if "two" in LATER[1] else "difference", "diff")
    return talk.ask(chat(*MORE[:2], ("user", asked), *MORE[3:]))


def tool_result_changed(talk: Talk) -> PrefixReport:
    found: list[Any] = [QUESTION, call('{"path": "src"}')]
    rest: list[Any] = [("assistant", ANSWER), LATER]
    talk.ask(chat(*found, turn("tool", SEARCHED, tool_call_id="call_1"), *rest, tools=TOOLS))
    new = changed(SEARCHED, ":40:", ":41:")
    return talk.ask(chat(*found, turn("tool", new, tool_call_id="call_1"), *rest, tools=TOOLS))


def template_variable(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, template_kwargs={"date_string": "26 Jul 2024"}))
    return talk.ask(chat(*MORE, template_kwargs={"date_string": "27 Jul 2024"}))


def template_effort(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, template_kwargs={"reasoning_effort": "low"}))
    return talk.ask(chat(*MORE, template_kwargs={"reasoning_effort": "high"}))


def answer_trimmed(talk: Talk) -> PrefixReport:
    talk.ask(chat(QUESTION), ANSWER)
    return talk.ask(chat(QUESTION, ("assistant", changed(ANSWER, " with slashes,", ",")), LATER))


def call_rewritten(talk: Talk) -> PrefixReport:
    given = '<tool_call>\n{"name": "search_text", "arguments": {"path": "src", "query": "the paths"}}\n</tool_call>'
    talk.ask(chat(QUESTION, tools=TOOLS), given.replace('": ', '":'))
    found = call('{"path": "src", "query": "the paths"}')
    return talk.ask(chat(QUESTION, found, turn("tool", SEARCHED, tool_call_id="call_1"), tools=TOOLS))


def other_tokens(talk: Talk) -> PrefixReport:
    words = talk.engine.tokenizer.vocabulary_size - 24
    answer = [*b"The names are", *range(words, words + 24), *b"."]
    text = talk.engine.tokenizer.decode(answer).decode()
    talk.ask(chat(QUESTION), answer)
    return talk.ask(chat(QUESTION, ("assistant", text), LATER))


def thinking(talk: Talk, *, sent: bool) -> PrefixReport:
    thought = "The user wants a reason. I know that Windows writes backslashes."
    style = talk.engine.thinking.style
    assert style is not None
    prompt = decode_spelled(
        talk.engine.tokenizer, talk.engine.prepare(Request(chat(QUESTION), think=True)).tokens
    ).decode()
    opening = "" if prompt.rstrip().endswith(style.opening) else style.opening
    talk.ask(Request(chat(QUESTION), think=True), f"{opening}\n{thought}\n{style.ending}{ANSWER}")
    others = {"reasoning_content": thought} if sent else {}
    return talk.ask(Request(chat(QUESTION, turn("assistant", ANSWER, **others), LATER), think=True))


def thinking_not_sent(talk: Talk) -> PrefixReport:
    return thinking(talk, sent=False)


def thinking_left_out(talk: Talk) -> PrefixReport:
    return thinking(talk, sent=True)


def thinking_of_calls(talk: Talk) -> PrefixReport:
    """The template keeps the thinking between tool calls, until the user asks the next question."""
    thought = {"reasoning_content": "The paths may be joined by hand. I search for slashes."}
    first: list[Any] = [QUESTION, {**call('{"path": "src"}'), **thought}, turn("tool", SEARCHED, tool_call_id="call_1")]
    talk.ask(chat(*first, tools=TOOLS), ANSWER)
    return talk.ask(chat(*first, ("assistant", ANSWER), LATER, tools=TOOLS))


def evicted(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE))
    for number in range(4):
        others = chat(("user", f"{number}: {' '.join(chr(97 + number) * n for n in range(40))}"), system="")
        talk.ask(others)
    return talk.ask(chat(*MORE))


def evicted_tail(talk: Talk) -> PrefixReport:
    """Only the beginning is still cached, in another conversation of the same client."""
    talk.ask(chat(*MORE))
    for _ in range(4):
        talk.ask(chat(("user", "Hello! Which of the files is the largest one?")))
        talk.engine.forget() if _ == 1 else None
    return talk.ask(chat(*MORE))


def other_key(talk: Talk) -> PrefixReport:
    talk.ask(Request(chat(*MORE), tenant="one"))
    return talk.ask(Request(chat(*MORE), tenant="two"))


def other_adapter(talk: Talk) -> PrefixReport:
    talk.ask(Request(chat(*MORE), adapters={"law": 1.0}))
    return talk.ask(Request(chat(*MORE), adapters={"law": 0.5}))


def cancelled(talk: Talk) -> PrefixReport:
    talk.queue(chat(*MORE))
    talk.engine.cancel_current()
    while not talk.engine.idle:
        talk.engine.step()
    return talk.ask(chat(*MORE))


def log_probabilities(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE))
    return talk.ask(Request(chat(*MORE), echo=True, logprobs=0))


def stored_states(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE))
    return talk.ask(chat(*MORE[:2], ("user", "Thank you, that is all. Bye!")), changes=True)


def waited(talk: Talk) -> PrefixReport:
    talk.queue(chat(*MORE))
    talk.engine.step()
    return talk.ask(chat(*MORE[:-1], ("user", "Stop.")))


def served_before_the_earlier_one(talk: Talk) -> PrefixReport:
    """Of two waiting requests with the same prefix, the later one may run first."""
    earlier, _ = talk.queue(chat(*MORE))
    later, _ = talk.queue(chat(*MORE[:-1], ("user", "Stop.")))
    while not talk.engine.idle:
        talk.engine.step()
    return talk.report_of(min(earlier, later, key=lambda one: one.prefill_started or 0))


def second_session(talk: Talk) -> PrefixReport:
    """The same questions again. Only the short answer to the first one has left the cache."""
    for _ in range(2):
        talk.ask(chat(QUESTION), ANSWER[:10])
        last = talk.ask(chat(QUESTION, ("assistant", ANSWER[:10]), ("user", "Go on.")))
    return last


def first(talk: Talk) -> PrefixReport:
    return talk.ask(chat(*MORE))


def first_of_another_program(talk: Talk) -> PrefixReport:
    talk.ask(chat(*MORE, tools=TOOLS))
    title = (
        "Summarize what people say to you in a title of three to seven words. Use no quotation marks.\n"
        "Name the topic rather than the kind of the task; leave out articles, names and numbers wherever possible.\n"
        "Begin with a capital letter, and end without a period. Answer in the language of the question.\n"
    )
    return talk.ask(chat(("user", "How do I cook rice without a pot?"), system=title))


C = PrefixCause
SYSTEM_PROMPT, TEMPLATE = "system prompt", "the template's own text"
# template, miss, cause, where, name of the tool, detail
CASES: list[tuple[str, Miss, PrefixCause, str, str, str]] = [
    *((name, system_time, C.DIFFERS, SYSTEM_PROMPT, "", "") for name in (QWEN, QWEN3, LLAMA, GPT_OSS, HERMES)),
    *((name, system_time_without_tools, C.DIFFERS, SYSTEM_PROMPT, "", "") for name in (LLAMA_3_2, GEMMA)),
    *((name, system_and_tools, C.DIFFERS, SYSTEM_PROMPT, "", "") for name in (QWEN, QWEN3)),
    *((name, tool_described, C.DIFFERS, "tool 3", "read_file", "") for name in (QWEN, LLAMA, GPT_OSS, HERMES)),
    *((name, tool_added, C.TOOLS, "tool 6", "ask_user", "added") for name in (QWEN, LLAMA, GPT_OSS)),
    (QWEN3, tool_added_first, C.TOOLS, "tool 1", "ask_user", "added"),
    *((name, tool_removed, C.TOOLS, "tool 2", "search_text", "removed") for name in (QWEN, HERMES)),
    *((name, tools_reordered, C.TOOLS, "tool 4", "run_tests", "order") for name in (QWEN3, LLAMA)),
    *((name, message_changed, C.DIFFERS, "message 4 (user)", "", "") for name in (QWEN, LLAMA, GEMMA, GPT_OSS)),
    *((name, tool_result_changed, C.DIFFERS, "message 4 (tool)", "", "") for name in (QWEN, LLAMA, HERMES)),
    *((name, template_variable, C.DIFFERS, TEMPLATE, "", "") for name in (LLAMA, LLAMA_3_2)),
    (GPT_OSS, template_effort, C.DIFFERS, TEMPLATE, "", ""),
    *((name, answer_trimmed, C.ANSWER, "message 3 (assistant)", "", "") for name in (QWEN, LLAMA, GEMMA)),
    (QWEN, call_rewritten, C.ANSWER, "message 3 (assistant)", "", ""),
    *((name, other_tokens, C.RETOKENIZED, "message 3 (assistant)", "", "") for name in (QWEN, LLAMA)),
    (QWEN3, thinking_not_sent, C.THINKING, "message 3 (assistant)", "", "not sent back by the client"),
    (QWEN3, thinking_left_out, C.THINKING, "message 3 (assistant)", "", "left out by the template"),
    (DEEPSEEK, thinking_left_out, C.THINKING, "message 3 (assistant)", "", "left out by the template"),
    (QWEN3, thinking_of_calls, C.THINKING, "message 3 (assistant)", "", "left out by the template"),
    ("channels", thinking_not_sent, C.THINKING, "message 3 (assistant)", "", "not sent back by the client"),
    *((name, evicted, C.EVICTED, "", "", "") for name in (QWEN, GEMMA)),
    (QWEN, evicted_tail, C.EVICTED, "", "", ""),
    *((name, other_key, C.OTHER_KEY, "", "", "") for name in (QWEN, LLAMA)),
    (QWEN, other_adapter, C.ADAPTER, "", "", ""),
    (QWEN, cancelled, C.UNFINISHED, "", "", ""),
    (QWEN, log_probabilities, C.LOGPROBS, "", "", ""),
    (QWEN, stored_states, C.STATES, "", "", ""),
    *((name, waited, C.WAITED, "", "", "") for name in (QWEN, GEMMA)),
    (QWEN, second_session, C.REUSED, "", "", ""),
    *((name, first, C.FIRST, "", "", "") for name in (QWEN, LLAMA)),
    (QWEN, served_before_the_earlier_one, C.FIRST, "", "", ""),
    *((name, first_of_another_program, C.FIRST, "", "", "") for name in (QWEN, LLAMA)),
]  # fmt: skip


def talk_of(name: str, miss: Miss) -> Talk:
    template = OWN.get(name) or source_of(name)
    adapters = [Adapter("law", "law.gguf", 1.0, (), "5c")] if miss is other_adapter else []
    return Talk(template, checkpoint=200 if miss is stored_states else None, adapters=adapters)


@pytest.mark.parametrize(("name", "miss", "cause", "where", "tool_name", "detail"), CASES)
def test_each_miss_has_the_right_cause(
    name: str, miss: Miss, cause: PrefixCause, where: str, tool_name: str, detail: str
) -> None:
    report = miss(talk_of(name, miss))
    assert (report.cause, report.where, report.name, report.detail) == (cause, where, tool_name, detail), report
    assert report.lost >= 16 or cause in (C.REUSED, C.FIRST, C.WAITED)


@pytest.mark.parametrize(
    ("prompts", "is_restarted"),
    [([MORE], False), ([MORE[:1], MORE], False), ([MORE], True)],
    ids=["first", "continued", "restarted"],
)
def test_clients_never_learn_what_other_keys_sent(
    prompts: Sequence[Sequence[tuple[str, str]]], is_restarted: bool
) -> None:
    told = []
    for others in ([], [MORE]):
        log = PrefixLog()
        if is_restarted:
            for turns in prompts:
                log.add("qwen", "", 1.0, Talk(source_of(QWEN)).ask(Request(chat(*turns), tenant="two")))
        talk = Talk(source_of(QWEN))
        for turns in others:
            talk.ask(Request(chat(*turns), tenant="one"))
        for turns in prompts:
            report = talk.ask(Request(chat(*turns), tenant="two"), ANSWER[:20])
        told.append(reused_words(log.completed(report), for_client=True))
    assert told[0] == told[1]


# How coding agents tell the model about the day, in their prompts of November 2026.
AGENTS = {
    "cline": ("2. Date: 11/30/2026", "2. Date: 12/1/2026"),
    "codex": ("<current_date>2026-11-30</current_date>", "<current_date>2026-12-01</current_date>"),
    "gptme": ("**Local date:** 2026-11-30 UTC+00:00", "**Local date:** 2026-12-01 UTC+00:00"),
    "opencode": ("  Today's date: Mon Nov 30 2026", "  Today's date: Tue Dec 1 2026"),
    "qwen-code": ("Today's date is Monday, November 30, 2026.", "Today's date is Tuesday, December 1, 2026."),
}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("where", ["system prompt", "message 2 (user)"])
def test_why_recognizes_the_dates_of_real_agents(agent: str, where: str) -> None:
    talk, reports = Talk(source_of(QWEN)), []
    for line in AGENTS[agent]:
        told = f"<env>\n1. Folder: /home/me/notes\n{line}\n</env>\n"
        if where == "system prompt":
            prompt = chat(*MORE, system=f"{SYSTEM}{told}Be brief.", tools=TOOLS)
        else:
            prompt = chat(("user", f"{told}{QUESTION[1]}"), *MORE[1:], tools=TOOLS)
        reports.append(talk.ask(prompt))
    [client] = clients_of(Record(0.0, "coder", f"{agent}/1.0", 1.0, report) for report in reports)
    _, heading, problem = sentences_of(client)
    assert heading == "1 did not:"
    its = "its " if where == "system prompt" else ""
    assert problem.startswith(f"  the client puts the date into {its}{where} (")


@pytest.mark.night
def test_explanations_take_little_time() -> None:
    """Prompts of 19,000 tokens, with as many earlier ones as are remembered. The bars hold for a busy machine, too."""
    talk = Talk(source_of(QWEN))
    files = [" ".join(str(number * seed % 9973) for number in range(3600)) for seed in range(7, 30)]
    for text in files:
        talk.ask(chat(("user", text), tools=TOOLS))
    hit = chat(("user", files[-1]), ("assistant", "Done."), ("user", "Go on."), tools=TOOLS)
    miss = chat(("user", files[-1]), tools=TOOLS, system=changed(SYSTEM, "16:05", "16:07"))
    seconds = {}
    for name, prompt in (("hit", hit), ("miss", miss)):
        answer = talk.engine.prepare(Request(prompt))
        talk.engine.predicted(answer)
        talk.history.expected(answer)
        began = time.thread_time()
        report = talk.history.expected(answer)
        seconds[name] = time.thread_time() - began
        assert (report.cause, report.total > 18_000) == (C.DIFFERS if name == "miss" else C.REUSED, True)
    assert seconds["hit"] < 0.005
    assert seconds["miss"] < 0.05
