"""Tests of conversations on disk: saved data survives truncation, locks, damage and a full disk."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.events import (
    FORMAT,
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Event,
    QuestionAsked,
    Thought,
    Undone,
    WasThinking,
    to_line,
)
from llmrun.cli.chatting.saying import ConversationRecord, resume_conversation
from llmrun.cli.chatting.store import (
    LARGEST_FILE,
    ConversationFileError,
    InUse,
    Journal,
    Store,
    answering_path,
    checked_name,
    lock_journal,
    name_for,
    read_conversation,
)
from tests.support.cli.commands import ROOT
from tests.support.cli.conversations import folded, histories, told
from tests.support.tiers import examples

BEGAN = b'{"event": "began", "format": 1, "conversation": "c", "model": "m", "created": "", "version": ""}\n'

ENDED = AnswerEnded("stop", 12, 8, 0, 4, 0.1, 0.2)


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
    assert record.path
    events = (AnswerBegan(1), Thought("hm"), AnswerWent("be"), WasThinking(), AnswerWent("cause"), ENDED)
    for event in events:
        record.add(event)
        assert told(read_conversation(record.path).conversation) == told(record.conversation)
        assert answering_path(record.path).exists() == (event is not ENDED)
    record.close()


def test_the_file_has_a_line_for_each_message(store: Store) -> None:
    record = recorded(store, asked("why?"), AnswerBegan(1), *map(AnswerWent, "because\nso"), ENDED, asked("and?"))
    assert record.path
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["began", "question", "answered", "question"]
    assert lines[2]["text"] == "because\nso"
    record.close()


@pytest.mark.push
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.push
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(most=8), tail=st.binary(max_size=20).filter(lambda data: b"\n" not in data))
def test_what_was_torn_off_is_gone_when_the_conversation_goes_on(
    tmp_path: Path, history: list[Event], tail: bytes
) -> None:
    path = tmp_path / "conversations" / "torn.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(to_line, history)) + tail)
    record, _ = resume_conversation(Store(path.parent), path)
    if record.conversation.unanswered is not None:
        record.add(Undone())
    record.add(asked("more"))
    continued = record.path
    assert continued is not None  # it is renamed if this is its first question
    record.close()
    assert told(read_conversation(continued).conversation) == told(record.conversation)


def test_files_are_private(store: Store) -> None:
    record = recorded(store, asked(), AnswerBegan(1))
    store.save("kept", record.conversation)
    paths = [store.folder, store.folder / "saved", store.folder / ".locks", *store.journals(), *store.named()]
    paths.append(answering_path(store.journals()[0]))
    assert len(paths) == 6
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
    other, found = resume_conversation(store, holder.path)
    assert "another process" in capsys.readouterr().err
    assert told(found.conversation) == told(holder.conversation)
    other.add(asked("yours"))
    holder.add(AnswerWent("!"))
    assert holder.path.read_bytes() == before
    holder.add(ENDED)
    assert holder.path.read_bytes().startswith(before)
    assert read_conversation(holder.path).conversation.exchanges[-1].answer == "yes!"
    assert other.path not in (None, holder.path)
    assert other.path
    assert told(read_conversation(other.path).conversation) == told(other.conversation)
    other.close()
    holder.close()


HOLD = """
import sys, time
from pathlib import Path
from llmrun.cli.chatting.saying import resume_conversation
from llmrun.cli.chatting.store import Store
path = Path(sys.argv[1])
record, _ = resume_conversation(Store(path.parent), path)
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
    again, _ = resume_conversation(store, path)
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
        (b"", "no complete line"),
        (b"{", "no complete line"),
        (b"\n", "line 1: not JSON"),
        (b'{"event": "undo"}\n', "line 1: the first event must be `began`"),
        (BEGAN + b'{"event": "undo"}\n', "line 2: nothing was asked yet"),
        (BEGAN + BEGAN, "line 2: a second `began` event"),
        (BEGAN + b"\x00" * 100 + b"\n", "line 2: not JSON"),
        (BEGAN + b'{"event": "undo"\n' + to_line(asked()), "line 2: not JSON"),
    ],
)
def test_a_damaged_file_is_one_line_and_stays_as_it_is(store: Store, data: bytes, said: str) -> None:
    path = write(store, "x.jsonl", data)
    with pytest.raises(ConversationFileError) as refused:
        resume_conversation(store, path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert path.read_bytes() == data
    assert list((store.folder / ".locks").iterdir()) == []


def test_a_pipe_in_the_place_of_a_file_does_not_hang(store: Store) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    store.folder.mkdir(parents=True)
    os.mkfifo(store.folder / "x.jsonl")
    assert store.latest() is None
    with pytest.raises(ConversationFileError, match="not a file"):
        read_conversation(store.folder / "x.jsonl")


def test_a_file_beyond_any_conversation_is_refused_unread(store: Store) -> None:
    path = write(store, "x.jsonl", b"")
    os.truncate(path, LARGEST_FILE + 1)
    with pytest.raises(ConversationFileError, match="larger than 64 MiB"):
        read_conversation(path)


@pytest.mark.night
def test_many_pieces_do_not_take_quadratic_time(store: Store) -> None:
    """The answer has 200,000 pieces of 10 characters. Concatenating them one by one would copy 200 GB."""
    pieces = to_line(AnswerWent("x" * 10)) * 200_000
    path = write(store, "x.jsonl", BEGAN + to_line(asked()) + to_line(AnswerBegan(1)) + pieces)
    assert len(read_conversation(path).conversation.exchanges[0].answer) == 2_000_000


def test_a_saved_copy_is_whole_and_does_not_change(store: Store) -> None:
    record = recorded(store, asked("a"), AnswerBegan(1), AnswerWent("A"))
    path = store.save("first", record.conversation)
    kept = path.read_bytes()
    record.add(AnswerWent("B"))
    loaded, _ = resume_conversation(store, store.find("first", "/load"))
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
    assert told(read_conversation(store.find("name", "/load")).conversation) == told(mine.conversation)
    with pytest.raises(UsageError, match="another conversation"):
        store.save("name", other.conversation)
    assert told(read_conversation(store.find("name", "/load")).conversation) == told(mine.conversation)
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
    record = recorded(store, asked("Why is the sky blue?"))
    store.save("groceries", record.conversation)
    record.close()
    for typed, hint in (
        ("grocery", "did you mean groceries?"),
        ("sky", "did you mean why-is-the-sky-blue?"),
        ("zzz", "/load lists them"),
    ):
        with pytest.raises(UsageError, match=f"^/load: {typed}: no such") as refused:
            store.find(typed, "/load")
        assert refused.value.hint == hint


def test_the_beginning_of_a_name_will_do_if_no_other_begins_so(store: Store) -> None:
    for question in ("Why is the sky blue?", "Why not?", "Why not?"):
        recorded(store, asked(question)).close()
    assert store.find("WHY-IS", "rm").stem == "why-is-the-sky-blue"
    assert store.find("why-not", "rm").stem == "why-not"
    with pytest.raises(UsageError, match=r"^rm: why: 3 conversations begin with this name") as refused:
        store.find("why", "rm")
    assert "why-not-2" in refused.value.hint


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Why is the sky blue?", "why-is-the-sky-blue"),
        ("  What's\tup,\ndoc?!", "whats-up-doc"),
        ("one two three four five six seven", "one-two-three-four-five-six"),
        ("x" * 500, "x" * 40),
        ("../../etc/passwd", "etc-passwd"),
        ("\x1b[31mred\x00", "31mred"),
        ("日本語は難しい？", "日本語は難しい"),
        ("Größe", "größe"),
        ("?!", "chat"),
        ("", "chat"),
    ],
)
def test_a_conversation_is_named_after_its_first_words(store: Store, question: str, name: str) -> None:
    first, second = recorded(store, asked(question)), recorded(store, asked(question))
    assert [record.path.stem for record in (first, second) if record.path] == [name, f"{name}-2"]
    first.close()
    second.close()


@given(st.text(max_size=200))
def test_every_own_name_is_a_name(question: str) -> None:
    assert checked_name(name_for(question)) == name_for(question)


def test_a_copy_does_not_take_the_name_of_a_conversation(store: Store) -> None:
    record = recorded(store, asked("a"))
    with pytest.raises(UsageError, match="already has this name"):
        store.save("a", record.conversation)
    store.save("b", record.conversation)
    record.close()
    other = recorded(store, asked("b"))
    assert other.path
    assert other.path.stem == "b-2"
    other.close()


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
from llmrun.cli.chatting.store import answering_path
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.store import Store, read_conversation
record = ConversationRecord(Store(Path(sys.argv[1])), new_conversation("m"))
record.add(QuestionAsked("why?", ""))
path = record.path
record.add(AnswerBegan(1))
pieces = answering_path(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (pieces.stat().st_size + 70, resource.RLIM_INFINITY))
for _ in range(5):
    record.add(AnswerWent("x" * 30))
print(record.path, len(record.conversation.exchanges[0].answer))
print(len(read_conversation(path).conversation.exchanges[0].answer), pieces.read_bytes()[-1:])
"""


def test_a_full_disk_is_one_note_and_the_chat_goes_on(store: Store) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store.folder)], capture_output=True, check=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == b"None 150\n30 b'\\n'\n"
    note = done.stderr.decode()
    assert note.count("\n") == 1
    assert "no longer being saved" in note
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


OLDER = (
    BEGAN
    + b'{"event": "question", "text": "why?", "time": ""}\n'
    + b'{"event": "answer", "seed": 1}\n'
    + b'{"event": "text", "text": "be"}\n'
    + b'{"event": "text", "text": "cause"}\n'
)
OLDER_END = b"""{"event": "end", "reason": "stop", "context_used": 9, "prompt_tokens": 5, "cached_tokens": 0, \
"generated_tokens": 4, "ttft_s": 0.1, "decode_s": 1}
"""


@pytest.mark.parametrize("data", [OLDER, OLDER + OLDER_END], ids=["killed", "ended"])
def test_a_file_of_an_older_format_is_converted_when_it_goes_on(store: Store, data: bytes) -> None:
    old = write(store, "20250101-000000-1f3a9c2e.jsonl", data)
    record, found = resume_conversation(store, old)
    assert found.conversation.exchanges[0].answer == "because"
    record.add(asked("and?"))
    assert record.path == old
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert [json.loads(line)["event"] for line in old.read_bytes().splitlines()] == [
        *("began", "question", "answered", "question")
    ]
    went_on = read_conversation(old).conversation
    assert (went_on.began.format, went_on.began.conversation) == (FORMAT, "c")
    assert [one.answer for one in went_on.exchanges] == ["because", ""]
    record.close()
    resume_conversation(store, old)[0].close()  # its lock was released


def test_a_new_answer_to_an_old_question_is_appended_to_the_converted_file(store: Store) -> None:
    """The old answer stays in the file until the new one is complete."""
    old = write(store, "old.jsonl", OLDER + OLDER_END)
    record, _ = resume_conversation(store, old)
    record.add(AnswerBegan(2))
    assert b'"because"' in old.read_bytes()
    record.add(AnswerWent("so"))
    record.add(ENDED)
    assert read_conversation(old).conversation.exchanges[0].answer == "so"
    record.close()


def test_a_conversion_that_fails_keeps_the_old_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(store, "old.jsonl", OLDER)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    record, _ = resume_conversation(store, old)
    record.add(asked("and?"))
    assert old.read_bytes() == OLDER
    assert [path.name for path in store.folder.iterdir() if path.name != ".locks"] == ["old.jsonl"]
    assert record.conversation.exchanges[1].question == "and?"


def answering(store: Store, *pieces: Event) -> Path:
    """Return the path of a conversation whose process died during an answer."""
    record = recorded(store, asked(), AnswerBegan(1), *pieces)
    path = record.path
    assert path
    record.close()
    return path


@pytest.mark.push
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=10), max_size=5), data=st.data())
def test_an_answer_cut_off_anywhere_is_kept_up_to_its_last_whole_line(
    tmp_path: Path, texts: list[str], data: st.DataObject
) -> None:
    store = Store(Path(tempfile.mkdtemp(dir=tmp_path)))
    record = recorded(store, asked(), AnswerBegan(1), *map(AnswerWent, texts))
    path = record.path
    assert path
    record.close()
    pieces = answering_path(path)
    lines = pieces.read_bytes().splitlines(keepends=True)
    cut = data.draw(st.integers(0, sum(map(len, lines))))
    pieces.write_bytes(b"".join(lines)[:cut])
    whole = sum(1 for end in itertools.accumulate(map(len, lines)) if end <= cut)
    found = read_conversation(path).conversation
    assert (found.unanswered is None) == (whole >= 2)
    assert found.exchanges[0].answer == "".join(texts[: max(0, whole - 2)])
    again, _ = resume_conversation(store, path)
    if again.conversation.unanswered is None:
        again.add(asked("more"))
        assert read_conversation(path).conversation.exchanges[0].answer == found.exchanges[0].answer
        assert not pieces.exists()
    again.close()


def test_an_answer_that_was_written_down_twice_counts_once(store: Store) -> None:
    """The process died after it wrote the line with the whole answer, before it removed the pieces."""
    path = answering(store, AnswerWent("because"))
    pieces = answering_path(path).read_bytes()
    record, _ = resume_conversation(store, path)
    record.add(asked("and?"))
    record.add(Undone())
    record.close()
    answering_path(path).write_bytes(pieces)
    again, found = resume_conversation(store, path)
    assert [one.answer for one in found.conversation.exchanges] == ["because"]
    again.add(asked("and?"))
    again.add(AnswerBegan(1))
    again.add(AnswerWent("new"))
    assert [one.answer for one in read_conversation(path).conversation.exchanges] == ["because", "new"]
    again.close()


def test_pieces_that_come_after_a_crash_are_appended_to_the_earlier_ones(store: Store) -> None:
    path = answering(store, AnswerWent("be"))
    with answering_path(path).open("ab") as file:
        file.write(b'{"event": "te')
    again, _ = resume_conversation(store, path)
    again.add(AnswerWent("cause"))
    assert read_conversation(path).conversation.exchanges[0].answer == "because"
    again.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not json\n", "line 3: not JSON"),
        (to_line(Undone()), "line 3: this is not a piece of an answer"),
        (b'{"event": "text", "text": "\\ud800"}\n', "line 3: text"),
    ],
)
def test_damaged_pieces_are_one_line_and_stay_as_they_are(store: Store, line: bytes, said: str) -> None:
    path = answering(store)
    data = answering_path(path).read_bytes() + line
    answering_path(path).write_bytes(data)
    with pytest.raises(ConversationFileError) as refused:
        resume_conversation(store, path)
    assert said in str(refused.value)
    assert answering_path(path).read_bytes() == data


def test_a_whole_answer_that_cannot_be_written_keeps_its_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded(store, asked(), AnswerBegan(1), AnswerWent("because"))
    path = record.path
    assert path
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    record.add(ENDED)
    assert record.path is None
    assert read_conversation(path).conversation.exchanges[0].answer == "because"


def test_a_conversation_in_which_nothing_is_said_any_more_leaves_no_file(store: Store) -> None:
    kept = recorded(store, asked("kept"))
    kept.close()
    record = recorded(store, asked("gone"), Undone())
    assert store.latest() == store.folder / "kept.jsonl"
    record.close()
    assert [path.name for path in store.journals()] == ["kept.jsonl"]
    assert list((store.folder / ".locks").iterdir()) == []
