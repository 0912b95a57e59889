"""Tests of images in chats, with a scripted model that answers with the colors that it sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.scripted import ScriptedBackend, echo
from llmrun.cli.arguments.images import GivenImage, read_image
from llmrun.cli.chatting.actions import image_choices
from llmrun.cli.chatting.draft_images import SIGNS
from llmrun.cli.chatting.saying import resume_conversation
from llmrun.cli.chatting.store import Store
from tests.support.cli.chats import Session, journals, session
from tests.support.engine.pictures import BLUE, RED, plain, png

pytestmark = pytest.mark.push

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with two images and the file of a projector."""
    monkeypatch.chdir(tmp_path)
    Path("red cat.png").write_bytes(png(plain(40, 20, RED)))
    Path("dog.png").write_bytes(png(plain(40, 60, BLUE)))
    Path("mmproj.json").write_text("{}")


def seeing(**options: Any) -> Any:
    """Return a session whose model "scripted" has a projector, but is open without it."""
    return session(Path("data"), projectors={"scripted": Path("mmproj.json")}, **options)


def answers(found: Session) -> list[str]:
    return [exchange.answer for exchange in found.chat.conversation.exchanges]


def send(found: Session, text: str = "", seen: list[str] | None = None) -> Callable[[], str]:
    """Return a turn that sends the draft, followed by a text. The draft as it is shown is appended to `seen`."""

    def typed() -> str:
        draft = found.turns.drafts[-1]
        if seen is not None:
            seen.append(found.chat.images.labelled(draft))
        return draft + text

    return typed


def given(*paths: str) -> Sequence[GivenImage]:
    return [read_image(path) for path in paths]


def test_an_image_is_shown_to_the_model(capsys: Capture) -> None:
    with seeing() as found:
        found.run("/image red cat.png", "what?")
        assert answers(found) == ["You said: [2 rows of #ff0000]what?"]
    assert "[image 1: red cat.png 40x20, 2 tokens]" in capsys.readouterr().err


def test_the_model_is_reopened_only_for_the_first_image() -> None:
    with seeing() as found:
        found.run("hi", "/image 'red cat.png'", "what?", "/image dog.png", "and?", "hm")
        assert found.opener.opened == ["scripted", "scripted"]
        assert answers(found)[2] == "You said: [4 rows of #0000ff]and?"


def test_several_images_keep_their_places() -> None:
    with seeing() as found:
        found.turns.edits_drafts = True

        def typed() -> str:
            red, blue = (found.chat.images.add(image) for image in given("red cat.png", "dog.png"))
            return f"is {red} or {blue} larger?"

        found.run(typed)
        assert answers(found) == ["You said: is [2 rows of #ff0000] or [4 rows of #0000ff] larger?"]
        assert found.chat.conversation.title == "is [image 1: red cat.png 40x20] or [image 2: dog.png 40x60]…"


def test_a_question_may_consist_of_an_image() -> None:
    with seeing() as found:
        found.turns.edits_drafts = True
        found.run("/image dog.png", send(found))
        assert answers(found) == ["You said: [4 rows of #0000ff]"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("", "no file given"),
        ("missing.png", "/image: missing.png: No such file"),
        ("missing cat.png", "put a path with spaces in quotes"),
        ("mmproj.json", "not an image"),
        ("https://example.org/a.png", "not from the network"),
    ],
)
def test_a_wrong_file_is_an_error(capsys: Capture, argument: str, said: str) -> None:
    with seeing() as found:
        found.run(f"/image {argument}".strip(), "hi")
        assert answers(found) == ["You said: hi"]
    assert said in capsys.readouterr().err


def test_names_of_files_in_questions_are_text(capsys: Capture) -> None:
    with seeing() as found:
        found.run("what is in dog.png?")
        assert answers(found) == ["You said: what is in dog.png?"]
    assert "/image dog.png shows the image to the model" in capsys.readouterr().err


def test_characters_that_stand_for_images_are_harmless_in_text() -> None:
    with seeing() as found:
        found.run(f"a {SIGNS[0]} b")
        assert not found.chat.conversation.images


def test_a_command_keeps_the_images_before_it() -> None:
    with seeing() as found:
        found.turns.edits_drafts = True
        seen: list[str] = []
        found.run("/image dog.png", send(found, " /image 'red cat.png'"), send(found, " x", seen))
        assert seen == ["[image 1: dog.png 40x60, 4 tokens][image 2: red cat.png 40x20, 2 tokens]"]
        assert answers(found) == ["You said: [4 rows of #0000ff][2 rows of #ff0000]x"]


def test_commands_take_no_images(capsys: Capture) -> None:
    with seeing() as found:
        found.turns.edits_drafts = True
        [image] = given("dog.png")
        found.run(lambda: f"/system see {found.chat.images.add(image)}")
        assert found.chat.conversation.system is None
    assert "/system: only questions can have images" in capsys.readouterr().err


def test_undo_puts_images_back() -> None:
    with seeing() as found:
        found.turns.edits_drafts = True
        seen: list[str] = []
        found.run("/image dog.png", send(found, " what?"), "/undo", send(found, "", seen))
        assert seen == ["[image 1: dog.png 40x60, 4 tokens] what?"]
        assert answers(found) == ["You said: [4 rows of #0000ff]what?"]


def test_retry_sees_the_images_again() -> None:
    with seeing() as found:
        found.run("/image dog.png", "what?", "/retry")
        assert answers(found) == ["You said: [4 rows of #0000ff]what?"]


def test_the_editor_shows_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def edited(text: str) -> str:
        seen.append(text)
        return text.replace("what", "who")

    monkeypatch.setattr("llmrun.cli.console.programs.edited", edited)
    with seeing() as found:
        found.run("/image dog.png", "what?", "/edit")
        assert seen == ["[image 2: dog.png 40x60, 4 tokens] what?"]
        assert answers(found)[1] == "You said: [4 rows of #0000ff]who?"


def test_an_image_deleted_in_the_editor_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.cli.console.programs.edited", lambda text: "no image")
    with seeing() as found:
        found.run("/image dog.png", "what?", "/edit")
        assert answers(found)[1] == "You said: no image"


def test_a_continued_chat_sees_its_images_again() -> None:
    with seeing() as found:
        found.run("/image dog.png", "what?")
    record, _ = resume_conversation(Store(Path("data/conversations")), journals(Path("data"))[0])
    with seeing(record=record) as found:
        found.run("and now?", "/retry")
        assert found.opener.opened == ["scripted", "scripted"]
        assert answers(found) == ["You said: [4 rows of #0000ff]what?", "You said: and now?"]


def test_a_missing_original_is_an_error(capsys: Capture) -> None:
    with seeing() as found:
        found.run("/image dog.png", "what?")
    for path in Path("data/conversations/images").glob("*.png"):
        path.unlink()
    record, _ = resume_conversation(Store(Path("data/conversations")), journals(Path("data"))[0])
    with seeing(record=record) as found:
        found.run("and now?")
        assert len(answers(found)) == 1
    told = capsys.readouterr().err
    assert "error: image dog.png: " in told
    assert "No such file" in told


def drop(found: Session, text: str) -> Callable[[], str]:
    """Return a turn with an image that was dropped into the input line."""
    return lambda: "".join(found.chat.images.add(image) for image in given("dog.png")) + text


def test_a_text_only_model_says_so_at_once(capsys: Capture) -> None:
    with session(Path("data")) as found:
        found.run("/image dog.png", "hi")
        assert answers(found) == ["You said: hi"]
        assert found.opener.opened == ["scripted"]
    assert "error: scripted: no projector (mmproj) found" in capsys.readouterr().err


def test_a_question_that_cannot_be_sent_is_offered_again(capsys: Capture) -> None:
    with session(Path("data")) as found:
        found.turns.edits_drafts = True
        seen: list[str] = []
        found.run(drop(found, " what?"), lambda: send(found, "", seen)() and "hi")
        assert seen == ["[image 1: dog.png 40x60] what?"]
        assert answers(found) == ["You said: hi"]
    assert "error: scripted: no projector (mmproj) found" in capsys.readouterr().err


def test_a_dropped_image_reopens_the_model_when_it_is_sent() -> None:
    with seeing() as found:
        found.turns.edits_drafts = True
        found.run("hi", drop(found, " what?"))
        assert answers(found)[1] == "You said: [4 rows of #0000ff]what?"
        assert found.opener.opened == ["scripted", "scripted"]


def test_a_projector_that_fails_leaves_the_chat_usable(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with seeing() as found:
        monkeypatch.setattr(found.opener, "fetch", lambda name, *, images: name)
        Path("mmproj.json").write_text('{"lines": "many"}')
        found.run("/image dog.png", drop(found, " what?"), "hi")
        assert answers(found) == ["You said: hi"]
        assert found.opener.opened == 5 * ["scripted"]
    assert capsys.readouterr().err.count("invalid script for the scripted projector") == 2


def test_a_model_without_a_projector_cannot_continue_images(capsys: Capture) -> None:
    with seeing(others={"blind": ScriptedBackend(echo)}) as found:
        found.run("/image dog.png", "what?", "/model blind", "and?")
        assert found.chat.model == "scripted"
    assert "blind: no projector" in capsys.readouterr().err


def test_after_clear_any_model_can_be_used() -> None:
    with seeing(others={"blind": ScriptedBackend(echo)}) as found:
        found.run("/image dog.png", "what?", "/clear", "/model blind", "and?")
        assert found.chat.model == "blind"


def test_scaling_is_reported_once(capsys: Capture) -> None:
    Path("big.png").write_bytes(png(plain(800, 600)))
    with seeing() as found:
        found.run("/image big.png", "what?", "and?", "/image big.png", "again?", "/retry")
    assert capsys.readouterr().err.count("big.png: scaled down from 800x600 to 512x512 pixels") == 1


def test_a_failed_encoding_ends_only_the_question(capsys: Capture) -> None:
    Path("mmproj.json").write_text(json.dumps({"error": "the encoder failed"}))
    with seeing() as found:
        found.run("/image dog.png", "what?", "hi")
        assert answers(found) == ["You said: hi"]
    assert "the encoder failed" in capsys.readouterr().err


def test_paths_are_completed() -> None:
    Path("folder").mkdir()
    Path("folder/a b.jpg").touch()
    Path(".hidden.png").touch()
    with seeing() as found:
        assert [path for path, _ in image_choices(found.chat, "")] == ["dog.png", "folder/", "red cat.png"]
        assert [path for path, _ in image_choices(found.chat, "folder/a")] == ["folder/a b.jpg"]
        assert [*image_choices(found.chat, "no-such-folder/")] == []


def test_an_image_without_a_question_gets_a_note(capsys: Capture) -> None:
    with seeing(interactive=False) as found:
        found.run("/image dog.png")
    assert "the model has not seen it" in capsys.readouterr().err


def test_a_full_context_reports_the_tokens_of_images(capsys: Capture) -> None:
    Path("big.png").write_bytes(png(plain(800, 600)))
    with seeing() as found:
        found.run("/set ctx_size 100", "/image big.png", "what?", "hi")
        assert answers(found) == ["You said: hi"]
    assert "the image takes 256 tokens" in capsys.readouterr().err


def test_searches_find_the_names_of_images(capsys: Capture) -> None:
    with seeing() as found:
        found.run("/image dog.png", "what?", "/search dog.png")
    assert "> [image 1: dog.png 40x60] what?" in capsys.readouterr().err


def test_images_are_left_out_only_with_their_turns(capsys: Capture) -> None:
    """There is no context shift, which crashed with images in ggml-org/llama.cpp#17071 and #13865."""
    with seeing() as found:
        begun = ("/set ctx_size 100", "/set on_full forget", "/image dog.png")
        found.run(*begun, "a" * 20, "b" * 20, "/image red cat.png", "c" * 20)
        said = ["[4 rows of #0000ff]" + "a" * 20, "b" * 20, "[2 rows of #ff0000]" + "c" * 20]
        assert answers(found) == [f"You said: {each}" for each in said]
    assert "the model no longer sees the oldest 1 turn (of 1)" in capsys.readouterr().err


def test_answers_about_images_end_at_the_end_of_the_context(capsys: Capture) -> None:
    """ggml-org/llama.cpp#17071: the context was full after an image. The conversation continues after /undo."""
    with seeing() as found:
        found.run("/set ctx_size 100", "/image dog.png", "a" * 50, "b", "/undo", "c")
        assert answers(found) == ["You said: c"]
    told = capsys.readouterr().err
    assert "the answer was cut off: the context of 100 tokens is full" in told
    assert "error: prompt does not fit in the context" in told
