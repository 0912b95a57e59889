"""Tests of the files of images in conversations: each is stored once, privately, and as long as it is needed."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import AnswerBegan, AnswerEnded, ImageShown, QuestionAsked, Undone
from llmrun.cli.chatting.image_files import ImageFileError
from llmrun.cli.chatting.saying import ConversationRecord, resume_conversation
from llmrun.cli.chatting.store import Store, read_conversation
from tests.support.engine.pictures import BLUE, plain, png

CAT, DOG = png(plain(3, 2)), png(plain(2, 3, BLUE))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "conversations")


def shown(data: bytes, at: int = 0) -> ImageShown:
    return ImageShown(at, sha256(data).hexdigest(), "cat.png", "PNG", 3, 2)


def held(store: Store, text: str, *files: bytes) -> ConversationRecord:
    """Return an open conversation with one question, which shows the files, and its answer."""
    record = ConversationRecord(store, new_conversation("m"))
    for data in files:
        record.hold(shown(data).sha256, data)
    record.add(QuestionAsked(text, "", tuple(map(shown, files))))
    record.add(AnswerBegan(1))
    record.add(AnswerEnded("stop", 1))
    return record


def kept(store: Store) -> set[bytes]:
    """Return the contents of all files of images."""
    return {path.read_bytes() for path in store.images.folder.glob("*.png")}


def test_each_image_is_stored_once_and_privately(store: Store) -> None:
    for text in ("one", "two"):
        held(store, text, CAT, CAT).close()
    [path] = store.images.folder.glob("*.png")
    assert (path.stem, path.read_bytes()) == (sha256(CAT).hexdigest(), CAT)
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_continued_conversation_has_its_images(store: Store) -> None:
    held(store, "one", CAT).close()
    record, found = resume_conversation(store, store.journals()[0])
    assert found.conversation.images == [shown(CAT)]
    assert record.image(shown(CAT)) == CAT
    record.close()


def test_images_go_with_their_last_conversation(store: Store) -> None:
    for text, files in (("one", (CAT, DOG)), ("two", (CAT,))):
        held(store, text, *files).close()
    store.remove(store.find("one", "rm"))
    assert kept(store) == {CAT}
    store.remove(store.find("two", "rm"))
    assert kept(store) == set()


def test_a_saved_copy_keeps_its_images(store: Store) -> None:
    record = held(store, "one", CAT)
    copy = store.save("copy", record.conversation)
    record.close()
    store.remove(store.find("one", "rm"))
    assert kept(store) == {CAT}
    forked, _ = resume_conversation(store, copy)
    assert forked.image(shown(CAT)) == CAT
    store.remove(copy)
    assert kept(store) == set()


def test_images_of_undone_questions_go_with_the_conversation(store: Store) -> None:
    record = held(store, "one")
    record.hold(shown(CAT).sha256, CAT)
    record.add(QuestionAsked("what?", "", (shown(CAT),)))
    record.add(Undone())
    record.close()
    store.remove(store.find("one", "rm"))
    assert kept(store) == set()


def test_a_conversation_without_questions_keeps_no_images(store: Store) -> None:
    record = held(store, "one", CAT)
    record.add(Undone())
    record.close()
    assert kept(store) == set()


def test_a_damaged_conversation_keeps_its_images(store: Store) -> None:
    held(store, "one", CAT).close()
    path = store.journals()[0]
    path.write_bytes(b"broken\n" + path.read_bytes())
    held(store, "two", DOG).close()
    store.remove(store.find("two", "rm"))
    assert kept(store) == {CAT}


def test_a_continued_copy_keeps_images_of_removed_conversations(store: Store) -> None:
    record = held(store, "one", CAT)
    copy = store.save("copy", record.conversation)
    record.close()
    store.remove(store.find("one", "rm"))
    forked, _ = resume_conversation(store, copy)
    store.remove(copy)
    forked.add(QuestionAsked("two", ""))
    forked.close()
    assert kept(store) == {CAT}


def test_copies_of_unsaved_conversations_have_their_images(store: Store) -> None:
    record = held(store, "one", CAT)
    store.images.path(shown(CAT)).unlink()
    with record.saving_images():
        store.save("copy", record.conversation)
    record.close()
    assert kept(store) == {CAT}


def test_images_of_conversations_that_begin_meanwhile_stay(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    held(store, "one", DOG).close()
    locked = store.images._locked

    @contextmanager
    def waiting() -> Iterator[None]:
        monkeypatch.setattr(store.images, "_locked", locked)
        held(store, "two", CAT).close()  # another process saves while this process waits for the lock
        with locked():
            yield

    monkeypatch.setattr(store.images, "_locked", waiting)
    store.remove(store.find("one", "rm"))
    assert kept(store) == {CAT}


def test_reformatted_conversations_keep_their_images(store: Store) -> None:
    held(store, "one", CAT).close()
    path = store.journals()[0]
    path.write_bytes(path.read_bytes().replace(b'": ', b'":'))
    store.remove_unused_images()
    assert kept(store) == {CAT}


@pytest.mark.parametrize(
    ("damage", "said"),
    [(Path.unlink, "cat.png: .*No such file"), (lambda path: path.write_bytes(DOG), "the file was changed")],
)
def test_missing_and_changed_images_are_errors(store: Store, damage: Callable[[Path], object], said: str) -> None:
    held(store, "one", CAT).close()
    damage(store.images.path(shown(CAT)))
    record, _ = resume_conversation(store, store.journals()[0])
    with pytest.raises(ImageFileError, match=said):
        record.image(shown(CAT))
    record.close()


def test_a_full_disk_ends_the_saving_with_a_note(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("llmrun.cli.chatting.image_files.write_private", full)
    record = held(store, "one", CAT)
    assert "no longer being saved" in capsys.readouterr().err
    assert record.image(shown(CAT)) == CAT
    record.close()


def test_conversations_are_named_after_words_or_the_first_image(store: Store) -> None:
    for text in ("What is it?", "", " "):
        held(store, text, CAT).close()
    assert sorted(path.stem for path in store.journals()) == ["cat", "cat-2", "what-is-it"]
    titles = [read_conversation(path).conversation.title for path in store.journals()]
    assert sorted(titles)[0] == "[image 1: cat.png 3x2]"
