"""Conversations on disk: whatever is cut off, locked, damaged or full, what was written is there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.events import FORMAT, AnswerBegan, AnswerWent, Event, QuestionAsked, Thought, Undone, to_line
from llmrun.cli.chatting.journal import ConversationFileError, InUse, Journal, lock_journal
from llmrun.cli.chatting.record import ConversationRecord, take_up
from llmrun.cli.chatting.store import LARGEST_FILE, Store, checked_name, read_conversation
from llmrun.errors import UsageError
from tests.support.cli.commands import ROOT
from tests.support.cli.conversations import folded, histories

BEGAN = b'{"event": "began", "format": 1, "conversation": "c", "model": "m", "created": "", "version": ""}\n'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "conversations")


def asked(text: str = "why?") -> QuestionAsked:
    return QuestionAsked(text, "2026-01-01T00:00:00Z")


def recorded(store: Store, *later: Event) -> ConversationRecord:
    record = ConversationRecord(store, new_conversation("m"))
    for event in later:
        record.add(event)
    return record


def test_a_conversation_without_a_question_leaves_no_file(store: Store) -> None:
    recorded(store).close()
    assert store.latest() is None
    assert not store.folder.exists()


def test_every_event_is_in_the_file_before_add_returns(store: Store) -> None:
    record = recorded(store, asked())
    for event in (AnswerBegan(1), AnswerWent("be"), AnswerWent("cause")):
        record.add(event)
        assert record.path
        assert read_conversation(record.path).conversation == record.conversation
    record.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), data=st.data())
def test_a_file_cut_off_anywhere_is_the_conversation_up_to_its_last_whole_line(
    tmp_path: Path, history: list[Event], data: st.DataObject
) -> None:
    lines = [to_line(event) for event in history]
    whole = b"".join(lines)
    cut = data.draw(st.integers(len(lines[0]), len(whole)))
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[:cut])
    kept = 0
    while sum(map(len, lines[: kept + 1])) <= cut and kept < len(lines):
        kept += 1
    found = read_conversation(path)
    assert found.conversation == folded(history[:kept])
    assert found.whole_bytes == sum(map(len, lines[:kept]))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(most=8), tail=st.binary(max_size=20).filter(lambda data: b"\n" not in data))
def test_what_was_torn_off_is_gone_when_the_conversation_goes_on(
    tmp_path: Path, history: list[Event], tail: bytes
) -> None:
    path = tmp_path / "conversations" / "torn.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(to_line, history)) + tail)
    record, _ = take_up(Store(path.parent), path)
    if record.conversation.unanswered is not None:
        record.add(Undone())
    record.add(asked("more"))
    record.close()
    assert read_conversation(path).conversation == record.conversation


def test_files_are_private(store: Store) -> None:
    record = recorded(store, asked())
    store.save("kept", record.conversation)
    paths = [store.folder, store.folder / "saved", store.folder / ".locks", *store.journals(), *store.named()]
    assert len(paths) == 5
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    record.close()


def test_a_closed_conversation_leaves_no_lock_behind(store: Store) -> None:
    recorded(store, asked()).close()
    assert list((store.folder / ".locks").iterdir()) == []
    assert len(list(store.folder.iterdir())) == 2


def test_the_latest_is_the_one_written_to_last(store: Store) -> None:
    first, second = recorded(store, asked("1")), recorded(store, asked("2"))
    for record, moment in ((first, 200), (second, 100)):
        assert record.path
        os.utime(record.path, (moment, moment))
    assert store.latest() == first.path
    first.close()
    second.close()


def test_a_conversation_in_use_is_taken_up_as_a_copy(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    holder = recorded(store, asked("mine"), AnswerBegan(1), AnswerWent("yes"))
    assert holder.path
    before = holder.path.read_bytes()
    other, found = take_up(store, holder.path)
    assert "another process" in capsys.readouterr().err
    assert found.conversation == holder.conversation
    other.add(asked("yours"))
    holder.add(AnswerWent("!"))
    assert holder.path.read_bytes() == before + to_line(AnswerWent("!"))
    assert other.path not in (None, holder.path)
    assert other.path
    assert read_conversation(other.path).conversation == other.conversation
    other.close()
    holder.close()


HOLD = """
import sys, time
from pathlib import Path
from llmrun.cli.chatting.record import take_up
from llmrun.cli.chatting.store import Store
path = Path(sys.argv[1])
record, _ = take_up(Store(path.parent), path)
print(record.path == path, flush=True)
time.sleep(100)
"""


def test_the_lock_of_a_killed_process_is_free(store: Store) -> None:
    record = recorded(store, asked(), AnswerBegan(1))
    path = record.path
    assert path
    record.close()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout
    assert holder.stdout.readline() == b"True\n"
    with pytest.raises(InUse):
        lock_journal(path)
    holder.kill()
    holder.communicate()
    again, _ = take_up(store, path)
    assert again.path == path
    again.close()


def write(store: Store, name: str, data: bytes) -> Path:
    store.folder.mkdir(parents=True, exist_ok=True)
    path = store.folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no whole line"),
        (b"{", "no whole line"),
        (b"\n", "line 1: not JSON"),
        (b'{"event": "undo"}\n', "line 1: it does not begin with its beginning"),
        (BEGAN + b'{"event": "undo"}\n', "line 2: nothing was asked yet"),
        (BEGAN + BEGAN, "line 2: a second beginning"),
        (BEGAN + b"\x00" * 100 + b"\n", "line 2: not JSON"),
        (BEGAN + b'{"event": "undo"\n' + to_line(asked()), "line 2: not JSON"),
    ],
)
def test_a_damaged_file_is_one_line_and_stays_as_it_is(store: Store, data: bytes, said: str) -> None:
    path = write(store, "x.jsonl", data)
    with pytest.raises(ConversationFileError) as refused:
        take_up(store, path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert path.read_bytes() == data
    assert list((store.folder / ".locks").iterdir()) == []


def test_a_pipe_in_the_place_of_a_file_does_not_hang(store: Store) -> None:
    store.folder.mkdir(parents=True)
    os.mkfifo(store.folder / "x.jsonl")
    assert store.latest() is None
    with pytest.raises(ConversationFileError, match="not a file"):
        read_conversation(store.folder / "x.jsonl")


def test_a_file_beyond_any_conversation_is_refused_unread(store: Store) -> None:
    path = write(store, "x.jsonl", b"")
    os.truncate(path, LARGEST_FILE + 1)
    with pytest.raises(ConversationFileError, match="more than 64 MiB"):
        read_conversation(path)


def test_many_pieces_do_not_take_quadratic_time(store: Store) -> None:
    """200,000 pieces of 10 characters, the answer asked for once: joined one by one they would be 200 GB of copies."""
    pieces = to_line(AnswerWent("x" * 10)) * 200_000
    path = write(store, "x.jsonl", BEGAN + to_line(asked()) + to_line(AnswerBegan(1)) + pieces)
    assert len(read_conversation(path).conversation.exchanges[0].answer) == 2_000_000


def test_a_saved_copy_is_whole_and_does_not_change(store: Store) -> None:
    record = recorded(store, asked("a"), AnswerBegan(1), AnswerWent("A"))
    path = store.save("first", record.conversation)
    kept = path.read_bytes()
    record.add(AnswerWent("B"))
    loaded, _ = take_up(store, store.find("first"))
    loaded.add(AnswerWent("C"))
    loaded.add(Undone())
    loaded.add(asked("b"))
    assert path.read_bytes() == kept
    assert loaded.path not in (None, path, record.path)
    loaded.close()
    record.close()


def test_a_name_is_saved_again_by_the_same_conversation_only(store: Store) -> None:
    mine, other = recorded(store, asked("a")), recorded(store, asked("b"))
    store.save("name", mine.conversation)
    mine.add(AnswerBegan(1))
    store.save("name", mine.conversation)
    assert read_conversation(store.find("name")).conversation == mine.conversation
    with pytest.raises(UsageError, match="another conversation"):
        store.save("name", other.conversation)
    assert read_conversation(store.find("name")).conversation == mine.conversation
    mine.close()
    other.close()


def test_a_damaged_copy_is_not_overwritten(store: Store) -> None:
    record = recorded(store, asked("a"))
    path = store.save("name", record.conversation)
    path.write_bytes(b"precious\n")
    with pytest.raises(ConversationFileError):
        store.save("name", record.conversation)
    assert path.read_bytes() == b"precious\n"
    record.close()


def test_an_unknown_name_is_met_with_the_nearest(store: Store) -> None:
    record = recorded(store, asked("a"))
    store.save("groceries", record.conversation)
    record.close()
    with pytest.raises(UsageError) as refused:
        store.find("grocery")
    assert refused.value.hint == "did you mean groceries?"


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", ".hidden", "-rf", "a:b", "C:x", "a*", "x."),
        *("a\0b", "a\nb", "a\x1b[31m", "\ud800", "x" * 65, "é" * 101),
    ],
)
def test_a_name_that_is_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        checked_name(name)


@given(st.text(max_size=80))
def test_an_accepted_name_names_a_file_in_its_folder(name: str) -> None:
    try:
        accepted = checked_name(name)
    except UsageError:
        return
    path = Path("/folder") / f"{accepted}.jsonl"
    assert path.parent == Path("/folder")
    assert path.name.isprintable()
    assert len(os.fsencode(path.name)) < 256
    assert checked_name(accepted) == accepted


@pytest.mark.parametrize("name", ["a", "Größe 2", "2026-01-01", "日本語", "v1.2", "a_b c"])
def test_ordinary_names_will_do(name: str) -> None:
    assert checked_name(f" {name} ") == name


FULL_DISK = """
import resource, sys
from pathlib import Path
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import AnswerBegan, AnswerWent, QuestionAsked
from llmrun.cli.chatting.record import ConversationRecord
from llmrun.cli.chatting.store import Store, read_conversation
record = ConversationRecord(Store(Path(sys.argv[1])), new_conversation("m"))
record.add(QuestionAsked("why?", ""))
path = record.path
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, resource.RLIM_INFINITY))
record.add(AnswerBegan(1))
for _ in range(5):
    record.add(AnswerWent("x" * 30))
print(record.path, len(record.conversation.exchanges[0].answer))
print(len(read_conversation(path).conversation.exchanges[0].answer), path.read_bytes()[-1:])
"""


def test_a_full_disk_is_one_note_and_the_chat_goes_on(store: Store) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store.folder)], capture_output=True, check=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == b"None 150\n30 b'\\n'\n"
    note = done.stderr.decode()
    assert note.count("\n") == 1
    assert "not saved from here on" in note
    assert "File too large" in note


@pytest.mark.parametrize("folder", ["/dev/null/conversations", "/proc/conversations"])
def test_a_folder_that_cannot_be_made_is_one_note(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = ConversationRecord(Store(Path(folder)), new_conversation("m"))
    record.add(asked())
    record.add(AnswerBegan(1))
    record.add(AnswerWent("on"))
    assert record.conversation.exchanges[0].answer == "on"
    note = capsys.readouterr().err
    assert note.count("\n") == 1
    assert folder in note


def test_an_event_that_does_not_fit_leaves_no_half_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded(store, asked())
    assert record.path
    whole = record.path.read_bytes()
    real = os.write

    def write_half_then_fail(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) // 2])

    path = record.path
    monkeypatch.setattr(os, "write", write_half_then_fail)
    record.add(AnswerBegan(1))
    assert path.read_bytes() == whole
    assert record.path is None


def test_a_journal_is_opened_only_by_who_holds_its_lock(store: Store) -> None:
    record = recorded(store, asked())
    assert record.path
    with pytest.raises(InUse):
        lock_journal(record.path)
    record.close()
    lock = lock_journal(store.journals()[0])
    journal = Journal(store.journals()[0], store.journals()[0].stat().st_size, lock)
    journal.close()
    journal.close()
    assert isinstance(read_conversation(store.journals()[0]).conversation, Conversation)


def test_a_journal_of_an_older_format_stays_as_it_is_and_goes_on_in_one_of_today(store: Store) -> None:
    store.folder.mkdir()
    old = store.folder / "old.jsonl"
    whole = BEGAN + to_line(asked()) + to_line(AnswerBegan(1)) + to_line(AnswerWent("so"))
    old.write_bytes(whole)
    record, _ = take_up(store, old)
    record.add(AnswerBegan(2))
    record.add(Thought("hm"))
    assert old.read_bytes() == whole
    assert record.path
    assert record.path != old
    went_on = read_conversation(record.path).conversation
    assert (went_on.began.format, went_on.began.conversation, went_on.exchanges[0].thinking) == (FORMAT, "c", "hm")
    record.close()
    take_up(store, old)[0].close()  # its lock was let go
