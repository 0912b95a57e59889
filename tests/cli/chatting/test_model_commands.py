"""Tests of /model, which switches to another model or keeps the current one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.errors import BadGGUF, DoesNotFit, ModelNotFound
from llmrun.cli.chatting.commands import completions
from llmrun.cli.chatting.model_in_use import ModelLost
from llmrun.cli.chatting.store import Store, read_conversation
from llmrun.options.settings import Settings
from tests.support.cli.chats import Session, journals, session

LONG = ("word " * 40).strip()

Capture = pytest.CaptureFixture[str]


def other(context_size: int = 4096) -> ScriptedBackend:
    voice = scripted_answers([("assistant\n", "other")])
    backend = ScriptedBackend(voice, path=Path("other"), context_size=context_size)
    backend.kv.key = "07" * 32  # another model's cache cannot be loaded
    return backend


@pytest.mark.push
def test_another_model_answers_with_the_conversation_kept(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, others={"other": other()}) as found:
        assert found.run("one", "/model other", "two", "/model") == 0
        assert found.said == [("one", "You said: one"), ("two", "other")]
        assert found.chat.model == "other"
        assert found.turns.meters[-1].context_size == 4096
        assert found.backend._closed
    told = capsys.readouterr().err
    assert "other answers from here on, context 4,096 tokens; the conversation continues" in told
    assert told.splitlines()[-1] == "the model is other; /model NAME opens another one"
    saved = read_conversation(journals(tmp_path)[0]).conversation
    assert (saved.model, saved.began.model) == ("other", "scripted")


def computed(found: Session) -> list[int]:
    return [one.prompt_tokens - one.cached_tokens for one in found.chat.totals]


@pytest.mark.parametrize("saves_blocks", [True, False], ids=["blocks", "whole"])
def test_an_earlier_model_computes_only_what_is_new(tmp_path: Path, saves_blocks: bool) -> None:
    """Covers the CPU engine, which saves blocks after each answer, and llama.cpp, which saves whole sequences."""
    second = other()
    second.kv.saves_blocks = saves_blocks
    with session(tmp_path, others={"other": second}, saves_state=True) as found:
        found.backend.kv.saves_blocks = saves_blocks
        found.run(LONG, "/model other", "two", "/model scripted", "three", "/model other", "four")
        whole, _, third, fourth = computed(found)
        assert (third < whole / 2, fourth < whole / 2) == (True, True)
        assert found.said[2] == ("three", "You said: three")


def test_set_ctx_size_reopens_the_model(tmp_path: Path, capsys: Capture) -> None:
    settings = Settings(ctx_size=8192)
    with session(tmp_path, others={"other": other()}, saves_state=True, settings=settings) as found:
        found.run(LONG, "/set num_ctx 9000", "two")
        assert found.turns.meters[-1].context_size == 9000
        assert computed(found)[1] < len(LONG) / 2
        found.run("/model other")
        assert found.turns.meters[-1].context_size == 9000
        found.run("/set num_ctx default")
        assert found.turns.meters[-1].context_size == 8192
        assert found.opener.opened == ["scripted", "scripted", "other", "other"]
    told = capsys.readouterr().err.splitlines()
    assert ("ctx_size 9000" in told, told[-1]) == (True, "ctx_size 8192 (the default)")


def test_a_context_that_does_not_fit_changes_nothing(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/set num_ctx 20000", "one")
        assert found.turns.meters[-1].context_size == 8192
        assert found.said == [("one", "You said: one")]
        assert found.chat.conversation.preferences == {}
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["error: no memory for this context", "the context size stays at 8,192 tokens"]


def test_undo_clear_and_load_after_a_switch_stay_right(tmp_path: Path) -> None:
    turns = [LONG, "/model other", "two", "/undo", "/model scripted", "/retry", "/clear", "new", "/load word", "last"]
    with session(tmp_path, others={"other": other()}, saves_state=True) as found:
        found.run(*turns)
        _, _, again, _, last = computed(found)
        assert again == 1  # the last token of the prompt, whose logits are needed
        assert last < len(LONG) / 2
        assert found.said == [(LONG, f"You said: {LONG}"), ("last", "You said: last")]


def test_removing_a_conversation_removes_the_states_of_all_models(tmp_path: Path) -> None:
    with session(tmp_path, others={"other": other()}, saves_state=True) as found:
        found.run(LONG, "/model other", "two")
    [journal] = journals(tmp_path)
    assert len(list(journal.parent.glob("*.kv"))) == 2
    (journal.parent / f"{journal.stem}.kv").touch()  # as earlier versions named it
    Store(journal.parent).remove(journal)
    assert [path.name for path in journal.parent.iterdir()] == [".locks"]


def test_the_model_in_use_is_not_opened_twice(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/model scripted")
        assert found.opener.opened == ["scripted"]
    assert "scripted is already in use" in capsys.readouterr().err


def test_a_name_that_means_nothing_leaves_the_model_open(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        assert found.run("one", "/model nope", "two") == 0
        assert found.said == [("one", "You said: one"), ("two", "You said: two")]
        assert found.opener.opened == ["scripted"]
        assert found.chat.totals[1].cached_tokens > 0
    told = capsys.readouterr().err
    assert "error: model: 'nope': neither a model in the catalogue nor a file" in told
    assert "scripted stays in use" in told


@pytest.mark.push
@pytest.mark.parametrize("error", [DoesNotFit("too big"), BadGGUF("damaged")])
def test_a_model_that_cannot_be_opened_gives_way_to_the_one_before(
    tmp_path: Path, capsys: Capture, error: DoesNotFit | BadGGUF
) -> None:
    with session(tmp_path, others={"bad": error}) as found:
        assert found.run("one", "/model bad", "two") == 0
        assert found.said == [("one", "You said: one"), ("two", "You said: two")]
        assert found.opener.opened == ["scripted", "bad", "scripted"]
        assert found.chat.conversation.model == "scripted"
    told = capsys.readouterr().err
    assert f"error: {error}" in told
    assert "scripted stays in use" in told


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, others={"other": other()}) as found:
        found.opener.templates = False
        found.run("/model other")
        assert found.opener.opened == ["scripted", "other", "scripted"]
    assert "--chat-template FILE" in capsys.readouterr().err


def test_ctrl_c_stops_a_download_and_the_model_stays(tmp_path: Path, capsys: Capture) -> None:
    def interrupted(name: str, *, images: bool) -> str:
        raise KeyboardInterrupt

    with session(tmp_path) as found:
        found.opener.fetch = interrupted  # type: ignore[method-assign]
        assert found.run("/model other", "one") == 0
        assert found.said == [("one", "You said: one")]
    assert "stopped; scripted stays in use" in capsys.readouterr().err


def test_when_the_model_before_is_gone_too_the_chat_ends(tmp_path: Path) -> None:
    models: dict[str, ScriptedBackend | BadGGUF] = {"bad": BadGGUF("damaged")}
    with session(tmp_path, others=models) as found:
        found.opener.lose_after_first = True
        with pytest.raises(ModelLost, match="scripted: cannot be reopened"):
            found.run("one", "/model bad", "two")
    assert [one.question for one in read_conversation(journals(tmp_path)[0]).conversation.exchanges] == ["one"]


def test_in_a_pipe_a_model_that_cannot_be_found_ends_the_chat(tmp_path: Path) -> None:
    with session(tmp_path, interactive=False) as found, pytest.raises(ModelNotFound):
        found.run("/model nope", "never asked")
    assert found.said == []


def test_names_of_the_catalogue_complete_model(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        names = [one.text for one in completions(found.chat, "/model qwen3:4")]
    assert {"qwen3:4b", "qwen3:4b-instruct"} <= set(names)
