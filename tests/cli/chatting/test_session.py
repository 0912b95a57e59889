"""Tests of the turn loop, run in this process: commands, answers and errors."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.backends.scripted import ScriptedBackend, echo, scripted_answers
from llmrun.base.errors import BackendCrashed, Cancelled, ContextExceeded, TemplateRefused, UsageError
from llmrun.base.types import Batch, Outputs
from llmrun.cli.chatting import actions
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import NAMES, AnswerBegan, AnswerWent, ModelChanged, QuestionAsked
from llmrun.cli.chatting.saying import ConversationRecord, resume_conversation
from llmrun.cli.chatting.store import Store, read_conversation
from llmrun.cli.console.output import out
from llmrun.engine.requests import Request
from llmrun.options.settings import Settings
from tests.support.cli.chats import Session, events_in, journals, session

Capture = pytest.CaptureFixture[str]


def interrupt(number: int = signal.SIGINT) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def cached(found: Session) -> list[int]:
    return [one.cached_tokens for one in found.chat.totals]


def computed(found: Session) -> list[int]:
    return [one.prompt_tokens - one.cached_tokens for one in found.chat.totals]


def test_a_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        assert found.run("one", "two", "three") == 0
        assert found.view.answers == ["You said: one", "You said: two", "You said: three"]
        used = [meter.context_used for meter in found.turns.meters[1:]]
        end_of_answer = 1  # drawn, but not run
        assert cached(found) == [0, used[0] - end_of_answer, used[1] - end_of_answer]


def test_undo_and_regen_compute_only_what_is_new(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("one", "two", "/undo", "twenty", "/regen")
        assert found.said == [("one", "You said: one"), ("twenty", "You said: twenty")]
        assert computed(found)[2] < computed(found)[1] + len("twenty")
        assert computed(found)[3] == 1


def test_undo_offers_the_question_to_be_edited(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("one", "two\nlines", "/undo", "/show")
        assert found.turns.drafts == ["", "", "", "two\nlines", ""]


def test_regen_uses_another_seed_even_when_one_is_set(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, settings=Settings(seed=7)) as found:
        found.run("one", "/regen", "/regen", "two")
    assert [event["seed"] for event in events_in(journals(tmp_path)[0]) if event["event"] == "answered"] == [7, 8, 7, 7]


def test_regen_at_temperature_0_says_that_it_is_in_vain(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, settings=Settings(sampling={"temperature": 0.0})) as found:
        found.run("one", "/regen")
    assert "temperature is 0" in capsys.readouterr().err


@pytest.mark.push
@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ("//etc is a folder", "/etc is a folder"),
        (" /etc is a folder", "/etc is a folder"),
        ('"""/etc"""', "/etc"),
        ('"""\n  a\n\n  b\n"""', "  a\n\n  b"),
        ("  indented\n  code\n", "  indented\n  code"),
    ],
)
def test_a_question_may_begin_with_a_slash_or_have_many_lines(tmp_path: Path, typed: str, question: str) -> None:
    with session(tmp_path) as found:
        found.run(typed)
        assert [asked for asked, _ in found.said] == [question]


@pytest.mark.parametrize("typed", ["", "   ", "\n", '""""""', '"""\n"""'])
def test_nothing_is_asked_with_nothing(tmp_path: Path, typed: str) -> None:
    with session(tmp_path) as found:
        found.run(typed)
        assert found.said == []
    assert journals(tmp_path) == []


@pytest.mark.push
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/exti", "/exti: no such command"),
        ("/", "/: no such command"),
        ("/set tempreature 1", "did you mean temperature?"),
        ("/set numpredcit 1", "did you mean max_tokens?"),
        ("/set xyzzy 1", "/set lists the settings"),
        ("/set num_thread 4", "cannot change during a chat"),
        ("/stats maybe", "known: on, off"),
        ("/set temperature warm", "temperature: 'warm' is not a number from 0 to 100"),
        ("/set temperature 101", "temperature: 101.0 is not a number from 0 to 100"),
        ("/set top_k 1.5", "is not an integer"),
        ("/set max_tokens 0", "max_tokens: 0 is not an integer of at least 1"),
        ("/set stop []", "is not a list of strings"),
        ("/set ctx_size -2", "ctx_size: -2 is not an integer of at least 1, or 0 for the model's trained context"),
        ("/show nothing", "known: model, template"),
        ("/undo", "nothing to undo"),
        ("/regen", "no question"),
        ("/save x", "nothing to save"),
        ("/load nope", "no such conversation"),
        ("/load ../../etc/passwd", "not a valid conversation name"),
        ("a\udcff", "not UTF-8"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_the_chat_goes_on(
    tmp_path: Path, capsys: Capture, typed: str, said: str
) -> None:
    with session(tmp_path) as found:
        assert found.run(typed, "still here") == 0
        assert found.said == [("still here", "You said: still here")]
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert said in told
    assert "Traceback" not in told


def test_a_mistake_in_a_pipe_ends_the_chat(tmp_path: Path) -> None:
    with session(tmp_path, interactive=False) as found, pytest.raises(UsageError):
        found.run("/exti", "never asked")
    assert found.said == []


def test_set_holds_from_the_next_answer_on(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/set max_tokens 3", "one", "/set max_tokens default", "/set stop said", "two")
        assert found.view.answers == ["You", "You "]
        found.run('/set stop [" tw", "x"]', "/set parameter temp 0.5", "two", "/set seed 5", "three")
        assert found.view.answers[2:] == ["You said:", "You said: three"]
        assert found.chat.sampling.temperature == 0.5
        assert found.chat.last_answer
        assert found.chat.last_answer.request.seed == 5


def test_set_and_show_tell_what_holds(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, settings=Settings(sampling={"top_k": 12})) as found:
        found.run("/set top_k", "/set top-k 3", "/set top_k default", "/show settings")
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == ["top_k 12", "top_k 3", "top_k 12 (the default)"]
    assert "top_k 12" in told[3]


def test_set_lists_all_settings_in_groups(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "room", lambda stream: 80)
    with session(tmp_path) as found:
        found.run("/set top_k 3", "/set")
    told = capsys.readouterr().err
    assert "\nSampling       temperature 0.8, top_k 3, top_p 0.95, min_p 0.05; not set: seed\n" in told
    assert "\nLimits         ctx_size 8192, on_full stop; not set: max_tokens, stop\n" in told
    assert told.endswith("/set NAME VALUE changes a setting, and /set NAME default resets it\n")
    assert all(f" {name}" in told for name in NAMES)
    assert "\n               adaptive_target -1.0, " in told
    assert len(told.splitlines()) <= 30


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/set num_predict 50", "max_tokens 50"),
        ("/set parameter num_predict 50", "max_tokens 50"),
        ("/set Top-K 7", "top_k 7"),
        ("/set topp 0.5", "top_p 0.5"),
        ("/set --temp 0.5", "temperature 0.5"),
        ("/set repetition_penalty 1.1", "repeat_penalty 1.1"),
        ("/set num_ctx", "ctx_size 8192"),
        ("/set format json", "json_object on"),
        ('/set format {"type": "object"}', 'json_schema {"type": "object"}'),
        ("/set noformat", "json_schema not set"),
        ("/set stop_sequences END", "stop 'END'"),
        ("/set system be brief", "the system prompt is set and applies from the next answer on"),
        ("/set nothink", "the model answers without thinking"),
        ("/set quiet", "every answer ends with a short closing line from here on"),
    ],
)
def test_set_takes_the_names_of_other_programs(tmp_path: Path, capsys: Capture, typed: str, said: str) -> None:
    with session(tmp_path) as found:
        found.run(typed)
    assert capsys.readouterr().err == f"{said}\n"


def test_noformat_resets_every_format(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("/set format json", "/set noformat")
        assert found.chat.conversation.preferences == {}


def test_the_system_prompt_can_be_shown_set_emptied_and_taken_back(tmp_path: Path) -> None:
    heard: list[str] = []

    def listening(history: str) -> int | None:
        heard.append(history)
        return echo(history)

    backend = ScriptedBackend(listening)
    with session(tmp_path, backend=backend, settings=Settings(system="mine")) as found:
        systems = []
        for command in ("/system be brief", '/system """\ntwo\nlines\n"""', '/system ""', "/system default", "/system"):
            found.run(command)
            systems.append(found.chat.conversation.system)
        assert systems == ["be brief", "two\nlines", "", "mine", "mine"]
        found.run("hello")
    assert "mine" in heard[-1]


@pytest.mark.parametrize(
    ("own", "typed", "said"),
    [
        (None, "/system default", "the system prompt is reset to the chat template's default, if it has one"),
        ("mine", "/system default", "the system prompt is reset to the one in your settings: mine"),
        (None, '/system ""', "the system prompt is empty from the next answer on and replaces the template's default"),
        (None, "/system be brief", "the system prompt is set and applies from the next answer on"),
    ],
)
def test_system_says_what_it_did(tmp_path: Path, capsys: Capture, own: str | None, typed: str, said: str) -> None:
    with session(tmp_path, settings=Settings(system=own)) as found:
        found.run("/system first", typed)
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_think_and_set_think_say_the_same_of_a_model_that_cannot(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        for command in ("/think", "/set think on"):
            found.run(command)
            assert "thinking cannot be switched on" in capsys.readouterr().err
        found.run("/set think_budget 100")
        assert "the budget has no effect" in capsys.readouterr().err
        assert found.chat.conversation.preferences == {"think_budget": 100}


def test_think_default_says_what_holds_then(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, settings=Settings(think=False)) as found:
        found.run("/think default")
        assert capsys.readouterr().err == "the model answers without thinking (the default)\n"
    with session(tmp_path) as found:
        found.run("/think default")
        assert capsys.readouterr().err == "the model decides by itself whether to think\n"


def test_a_budget_of_0_takes_back_thinking(tmp_path: Path) -> None:
    template = "{% if enable_thinking is defined and not enable_thinking %}{% endif %}<think></think>{{ messages }}"
    with session(tmp_path, backend=ScriptedBackend(echo, chat_template=template)) as found:
        found.run("/set think on", "/set think_budget 0")
        assert found.chat.conversation.preferences == {"think_budget": 0}
        found.run("/set think on")
        assert found.chat.conversation.preferences == {"think": True}


def test_show_shows_everything_and_each_thing(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("hello")
        capsys.readouterr()
        found.run("/show")
        told = capsys.readouterr().err
        for part in (
            "model       scripted",
            "context     8,192",
            "temperature 0.8",
            "of 8,192 tokens",
            "turns       1",
        ):
            assert part in told
        found.run("/show template")
        assert "chatml (fallback)" in capsys.readouterr().err
        found.run("/show conversation")
        assert capsys.readouterr().err.splitlines()[:2] == ["> hello", "You said: hello"]


def test_control_characters_of_a_conversation_are_shown_not_obeyed(tmp_path: Path, capsys: Capture) -> None:
    backend = ScriptedBackend(scripted_answers([("assistant\n", "\x1b]52;c;aGk=\x07")]))
    with session(tmp_path, backend=backend) as found:
        found.run("\x1b[2J\x9bhi", "/show conversation", "/undo", "/system \x1b[31m", "/show", "/load")
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert "\x9b" not in told
    assert "␛[2J<9B>hi" in told


def test_save_load_and_go_on(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/system brief", "/set top_k 3", "one", "/save early", "two", "/load early", "/show settings")
        assert found.said == [("one", "You said: one")]
        assert (found.chat.conversation.system, found.chat.conversation.preferences) == ("brief", {"top_k": 3})
        found.run("three", "/load")
    told = capsys.readouterr().err
    assert 'loaded "one", 1 turn,' in told
    assert re.search(r"^early +just now  scripted +1  one$", told, re.MULTILINE)
    assert len(journals(tmp_path)) == 2


def test_a_new_answer_in_a_loaded_copy_is_saved_as_it_comes(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("one", "/save here", "two", "/load here", "/regen")
        assert found.chat.record.path in journals(tmp_path)
        saved = read_conversation(found.chat.record.path).conversation
        assert [(one.question, one.answer) for one in saved.exchanges] == [("one", "You said: one")]
        assert saved.exchanges[0].began == found.chat.conversation.exchanges[0].began


@pytest.mark.push
def test_load_takes_a_journal_too_but_not_the_one_that_is_open(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("one")
        first = journals(tmp_path)[0]
        found.run(f"/load {first.stem}")
        assert "already open" in capsys.readouterr().err
    with session(tmp_path) as found:
        found.run("other", f"/load {first.stem}", "two")
        assert found.chat.record.path == first
    assert [event["text"] for event in events_in(first) if event["event"] == "question"] == ["one", "two"]


def test_ctrl_c_keeps_what_was_said_and_the_conversation(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.view.on_text = lambda piece: interrupt()() if piece == "d" else None
        assert found.run("one", "two") == 0
        assert found.said == [("one", "You said"), ("two", "You said")]
        assert not found.view.open
    ends = [event["reason"] for event in events_in(journals(tmp_path)[0]) if event["event"] == "answered"]
    assert ends == ["cancelled", "cancelled"]


def test_many_ctrl_c_within_one_answer_are_one_wish(tmp_path: Path) -> None:
    with session(tmp_path) as found:

        def impatient(piece: str) -> None:
            for _ in range(20):
                interrupt()()

        found.view.on_text = impatient
        assert found.run("one") == 0
        assert found.said == [("one", "Y")]


def test_ctrl_c_before_the_first_word_takes_the_question_back(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        forward = found.backend.forward

        def stopped(batch: Batch) -> Outputs:
            interrupt()()
            found.backend.forward = forward  # type: ignore[method-assign]
            raise Cancelled("in the middle of a pass")

        found.backend.forward = stopped  # type: ignore[method-assign]
        found.run("one", "two")
        assert found.turns.drafts == ["", "one", ""]
        assert found.view.answers == ["You said: two"]
        assert found.said == [("two", "You said: two")]
    assert "stopped before the answer began" in capsys.readouterr().err


def test_ctrl_c_in_the_prefill_of_regen_keeps_the_old_answer(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("one")

        def stopped(batch: Batch) -> Outputs:
            interrupt()()
            raise Cancelled("in the middle of a pass")

        found.backend.forward = stopped  # type: ignore[method-assign]
        found.run("/regen")
        assert found.said == [("one", "You said: one")]
        assert found.turns.drafts[-1] == ""


def test_ctrl_c_at_the_prompt_reads_another_turn(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with session(tmp_path) as found:
        assert found.run(interrupted, interrupt(), "one") == 0
        assert found.said == [("one", "You said: one")]


def test_ctrl_c_in_a_pipe_ends_the_chat_after_the_answer(tmp_path: Path) -> None:
    with session(tmp_path, interactive=False) as found:
        found.view.on_text = lambda piece: interrupt()()
        assert found.run("one", "two") == 130
        assert found.said == [("one", "Y")]


@pytest.mark.push
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_that_ends_programs_ends_the_answer_and_the_chat(tmp_path: Path, name: str, code: int) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    with session(tmp_path) as found:
        found.view.on_text = lambda piece: interrupt(signal.Signals[name])()
        assert found.run("one", "two") == code
        assert found.said == [("one", "Y")]
    with session(tmp_path) as found, pytest.raises(SystemExit) as ended:
        found.run(interrupt(signal.Signals[name]))
    assert ended.value.code == code


def test_a_context_that_is_full_keeps_the_session_and_the_question(tmp_path: Path, capsys: Capture) -> None:
    long = "x" * 150
    with session(tmp_path, backend=ScriptedBackend(echo, context_size=200)) as found:
        assert found.run("one", long, "/undo", "/clear", "two") == 0
        told = capsys.readouterr().err
        assert "limit of 200" in told
        assert "/set on_full forget continues without the oldest turns" in told
        assert "/undo removes the last turn, /clear starts over" in told
        assert found.turns.drafts[2] == long
        assert found.said == [("two", "You said: two")]


def test_a_context_that_fills_up_in_an_answer_says_so(tmp_path: Path, capsys: Capture) -> None:
    backend = ScriptedBackend(scripted_answers([("assistant\n", "x" * 500)]), context_size=100)
    with session(tmp_path, backend=backend) as found:
        found.run("one")
        assert found.chat.meter.context_used == 100
    assert "the answer was cut off: the context of 100 tokens is full: /set on_full" in capsys.readouterr().err


def test_no_limit_of_tokens_overrides_a_setting(tmp_path: Path) -> None:
    with session(tmp_path, settings=Settings(max_tokens=3)) as found:
        found.run("/set max_tokens -1", "one")
        assert found.said == [("one", "You said: one")]


def test_an_answer_cut_by_max_tokens_says_so(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, settings=Settings(max_tokens=3)) as found:
        found.run("one")
    assert "the answer was cut off after 3 tokens" in capsys.readouterr().err


def test_a_full_context_in_a_pipe_is_raised(tmp_path: Path) -> None:
    with (
        session(tmp_path, backend=ScriptedBackend(echo, context_size=50), interactive=False) as found,
        pytest.raises(ContextExceeded),
    ):
        found.run("x" * 100)


@pytest.mark.parametrize("said_before", [0, 4])
def test_a_crash_of_the_backend_ends_the_chat_with_everything_saved(tmp_path: Path, said_before: int) -> None:
    with session(tmp_path) as found:
        found.run("before")
        forward, calls = found.backend.forward, [0]

        def crash(batch: Batch) -> Outputs:
            if calls[0] == said_before:
                raise BackendCrashed("the backend died")
            calls[0] += 1
            return forward(batch)

        found.backend.forward = crash  # type: ignore[method-assign]
        with pytest.raises(BackendCrashed):
            found.run("after")
        assert not found.view.open
    saved = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.answer for one in saved.exchanges] == ["You said: before", "You said"[:said_before]]
    assert saved.unanswered == (None if said_before else "after")


@pytest.mark.push
def test_a_question_without_an_answer_is_offered_when_the_conversation_goes_on(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.backend.forward = lambda batch: (_ for _ in ()).throw(BackendCrashed("x"))  # type: ignore[method-assign]
        with pytest.raises(BackendCrashed):
            found.run("lost?")
        store = found.chat.store
    record, _ = resume_conversation(store, journals(tmp_path)[0])
    with session(tmp_path, record=record) as found:
        found.run("found")
        assert found.turns.drafts == ["lost?", ""]
        assert found.said == [("found", "You said: found")]


def test_the_meter_follows_the_conversation(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        found.run("one", "two", "/undo", "/clear", "/exit", "never read")
        used = [meter.context_used for meter in found.turns.meters]
        assert used[0] == 0
        assert 0 < used[1] < used[2]
        assert used[3:] == [used[1], 0]
        assert found.turns.turns == ["never read"]


def test_stats_of_a_whole_session(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/stats")
        assert capsys.readouterr().err == "no answers yet\n"
        found.run("one", "/stats")
        assert "all answers" not in capsys.readouterr().err
        found.run("two")
        capsys.readouterr()
        found.run("/stats")
        last, whole = capsys.readouterr().err.split("all answers of this chat:\n")
    assert [line.split()[0] for line in last.splitlines()] == [
        *("last", "model", "prompt", "answer", "TTFT", "decode", "time", "context", "seed")
    ]
    told = whole.splitlines()
    assert told[0] == "answers     2"
    assert f"tokens out  {sum(one.generated_tokens for one in found.chat.totals)}" in told
    assert [line.split()[0] for line in told] == ["answers", "tokens", "tokens", "time", "TTFT", "decode"]


def test_stats_on_shows_the_statistics_after_every_answer(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "stats", False)
    with session(tmp_path) as found:
        found.run("one", "/stats on", "two", "/set quiet", "three")
    told = capsys.readouterr().err.splitlines()
    assert ["TTFT" in line for line in told] == [False, False, True, False, False]
    assert re.fullmatch(r"14 tokens in [\d.]+ s.*, [\d,.]+ tok/s", told[0])


# --- /clear, /search and the counts of /show


def test_clear_begins_a_new_conversation_and_says_how_to_get_back(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/system brief", "/set top_k 3", "Why, though?", "/clear")
        assert capsys.readouterr().err.splitlines()[-1] == (
            "cleared; to go back: /load why-though, or later llmrun chat --continue why-though"
        )
        assert found.said == []
        assert (found.chat.conversation.system, found.chat.conversation.preferences) == ("brief", {"top_k": 3})
        found.run("two", "/load why-though")
        assert found.said == [("Why, though?", "You said: Why, though?")]
        found.run("/load two")
        assert found.said == [("two", "You said: two")]
    assert sorted(path.stem for path in journals(tmp_path)) == ["two", "why-though"]
    assert events_in(journals(tmp_path)[-1])[-1]["text"] == "You said: two"


def test_clear_without_a_question_leaves_no_file(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/clear", "one", "/undo", "/clear", "/clear")
        assert capsys.readouterr().err.splitlines()[-1] == "cleared; the system prompt and the settings are kept"
    assert journals(tmp_path) == []


def test_clear_says_that_a_conversation_could_not_be_saved(tmp_path: Path, capsys: Capture) -> None:
    record = ConversationRecord(Store(Path("/dev/null/x")), new_conversation("scripted"))
    with session(tmp_path, record=record) as found:
        found.run("one", "/clear")
    assert capsys.readouterr().err.splitlines()[-1] == "cleared; the previous conversation could not be saved"


@pytest.mark.push
def test_search_finds_words_here_and_in_earlier_conversations(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("The \x1b[31mblue\x9b sky", "/clear", "A blue sea", "and a fox")
        capsys.readouterr()
        found.run("/search BLUE")
        told = capsys.readouterr().err
        assert told.splitlines() == [
            "this conversation",
            "  > A blue sea",
            "    You said: A blue sea",
            "the-31mblue-sky",
            "  > The ␛[31mblue<9B> sky",
            "    You said: The ␛[31mblue<9B> sky",
            "/load NAME continues one of these conversations",
        ]
        found.run('/search "blue sea"', "/search blue fox", "/search", "/search it's")
        told = capsys.readouterr().err
    assert "the-31mblue-sky" not in told
    assert "no conversation contains all of these: blue, fox\n" in told
    assert "error: /search: no words to search for\n" in told
    assert "no conversation contains this: it's\n" in told


def used(told: str) -> list[str]:
    return [line.removeprefix("used        ") for line in told.splitlines() if line.startswith("used")]


@pytest.mark.push
def test_show_counts_a_conversation_that_is_taken_up(tmp_path: Path, capsys: Capture) -> None:
    """Covers a conversation whose process died during its only answer, so that no token count was saved."""
    with session(tmp_path) as found:
        found.run("one", "/show")
        path = found.chat.record.path
        assert path
    [counted] = used(capsys.readouterr().err)
    record, _ = resume_conversation(Store(path.parent), path)
    with session(tmp_path, record=record) as found:
        found.run("/show")
        assert used(capsys.readouterr().err) == [counted]
        killed = ConversationRecord(found.chat.store, new_conversation("scripted"))
        for event in (QuestionAsked("one", ""), AnswerBegan(1), AnswerWent("You said: one")):
            killed.add(event)
        path = killed.path
        assert path
        killed.close()
    record, _ = resume_conversation(Store(path.parent), path)
    with session(tmp_path, record=record) as found:
        found.run("/show", "two", "/show")
        told = used(capsys.readouterr().err)
        first = int(told[0].split()[0])
        assert abs(first - int(counted.split()[0])) <= 2  # the end of the answer and its newline
        assert int(told[1].split()[0]) > first
        assert found.turns.meters[0].context_used == first


def test_show_counts_anew_when_another_model_goes_on(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("one")
        found.chat.record.add(ModelChanged("another"))
        assert not found.chat.conversation.is_counted
        counted: list[int] = []
        real = found.chat.engine.prompt_tokens
        found.chat.engine.prompt_tokens = lambda request: counted.append(1) or real(request)  # type: ignore[method-assign,func-returns-value]
        found.run("/show", "/show")
        assert counted == [1]


def test_show_says_when_nobody_can_count(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.chat.engine.prompt_tokens = lambda request: None  # type: ignore[method-assign]
        found.run("one")
        found.chat.record.add(ModelChanged("another"))
        capsys.readouterr()
        found.run("/show")
    assert used(capsys.readouterr().err) == ["known after the next answer"]


def test_show_survives_a_template_that_refuses_to_end_in_an_answer(tmp_path: Path, capsys: Capture) -> None:
    def refuse(request: Request) -> int:
        raise TemplateRefused("roles must alternate")

    with session(tmp_path) as found:
        found.chat.engine.prompt_tokens = refuse  # type: ignore[method-assign]
        found.run("one")
        found.chat.record.add(ModelChanged("another"))
        capsys.readouterr()
        found.run("/show")
    assert used(capsys.readouterr().err) == ["known after the next answer"]


@pytest.mark.push
def test_load_lists_the_last_ten_and_counts_the_others(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run(*(turn for number in range(13) for turn in (f"question {number}", "/clear")))
        capsys.readouterr()
        found.run("/load")
    told = capsys.readouterr().err.splitlines()
    assert (len(told), told[-1]) == (12, "and 3 more: llmrun conversations lists them")
