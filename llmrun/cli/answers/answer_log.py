"""The answer log, a JSON Lines file to which `generate --log` appends and which `llmrun logs` reads.

    logs/answers.jsonl   in the data folder; the folder has mode 0700, and the file has mode 0600
    logs/.answers.lock   a lock, which is held while a line is appended or the log is removed

The lock prevents concurrent processes from interleaving their lines, and makes it safe to remove a partial line when
the disk is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from llmrun.base.folders import O_BINARY, data_folder
from llmrun.cli.answers.report import completion_body
from llmrun.cli.console.output import out
from llmrun.engine.requests import ChatPrompt, FillPrompt, TextPrompt
from llmrun.options.sampling_params import SAMPLING

if TYPE_CHECKING:
    from llmrun.cli.answers.report import AnsweredRequest

_PATIENCE_S = 10.0  # maximum time to wait for the lock
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | O_BINARY
_SEARCHED = ("prompt", "suffix", "system", "answer", "reasoning", "model", "preset", "template")  # template is obsolete

Entry = Mapping[str, Any]


class Logged(Struct, frozen=True):
    """The entries found, oldest first, and the number of log lines that could not be read."""

    entries: Sequence[Entry]
    damaged: int


class AnswerLog:
    """A log file, which does not have to exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entry: Entry) -> None:
        """Append an entry and sync the file to disk. On failure, removes any partial line and raises OSError."""
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self.path.parent.parent.mkdir(parents=True, exist_ok=True)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            descriptor = os.open(self.path, _FLAGS, 0o600)
            try:
                _append(descriptor, line)
            finally:
                os.close(descriptor)

    def last(self, count: int | None, words: Sequence[str] = ()) -> Logged:
        """Return the last `count` entries that contain all the given words, ignoring case.

        If `count` is None, the method returns all matching entries.

        Raises OSError if the log exists but cannot be read.
        """
        folded = [word.casefold() for word in words]
        found: deque[Entry] = deque(maxlen=count)
        damaged = 0
        for line in self._lines():
            entry = _entry(line)
            if entry is None:
                damaged += 1
            elif _has(entry, folded):
                found.append(entry)
        return Logged(tuple(found), damaged)

    def clear(self) -> int:
        """Remove the log and return the number of removed lines. Raises OSError."""
        if not self.path.exists():
            return 0
        with self._locked():
            count = sum(1 for _ in self._lines())
            self.path.unlink(missing_ok=True)
        return count

    def _lines(self) -> Iterator[bytes]:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # reading from a pipe might never end
                raise OSError(0, "not a file", str(self.path))
            with self.path.open("rb") as file:
                yield from file
        except FileNotFoundError:
            return

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises OSError, including its subclass Timeout from filelock."""
        import filelock

        with filelock.FileLock(self.path.with_name(".answers.lock"), mode=0o600, timeout=_PATIENCE_S):
            yield


def answer_log() -> AnswerLog:
    """Return the user's answer log, which is in the data folder."""
    return AnswerLog(data_folder("logs") / "answers.jsonl")


def logger(preset: str | None, images: Mapping[str, str]) -> Callable[[AnsweredRequest], None]:
    """Return a function that logs a finished answer.

    If logging fails, the function only prints a note, because the user already has the answer.

    preset  the name of the preset in use, or None
    images  the names of the images in the prompt by SHA-256; the images themselves are not logged
    """

    def log(done: AnsweredRequest) -> None:
        found = answer_log()
        try:
            found.append(entry_of(done, preset, images))
        except OSError as error:
            out.note(f"this answer was not logged: {found.path}: {error.strerror or error}")

    return log


def entry_of(done: AnsweredRequest, preset: str | None, images: Mapping[str, str]) -> dict[str, Any]:
    """Return the log entry for an answer.

    The entry omits secrets, namely the Hub token, passwords in URLs and the values of environment variables whose names
    suggest a secret.
    """
    from llmrun.jobs.doctor.examine import Secrets

    hidden = Secrets().hidden
    request, body = done.request, completion_body(done)
    system, prompt = _asked(done)
    after = request.prompt.suffix if isinstance(request.prompt, FillPrompt) else None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": hidden(done.model),
        "preset": preset,
        "system": None if system is None else hidden(system),
        "prompt": hidden(prompt),
        "suffix": None if after is None else hidden(after),
        "images": [{"name": hidden(name), "sha256": sha256} for sha256, name in images.items()] or None,
        "answer": hidden(done.text),
        "reasoning": hidden(done.reasoning) or None,
        "finish_reason": str(done.finished.reason),
        "sampling": {name: getattr(request.sampling, name) for name in SAMPLING if request.sends(name)},
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop": [hidden(text) for text in request.stop],
        "usage": body["usage"],
        "timings": body["timings"],
        "run": body["run"],
    }


def _asked(done: AnsweredRequest) -> tuple[str | None, str]:
    """Return the system prompt and the user's prompt."""
    prompt = done.request.prompt
    if isinstance(prompt, ChatPrompt):
        texts = {message["role"]: message["content"] for message in prompt.messages}
        asked = texts["user"]  # a text, or images followed by a text
        return texts.get("system"), asked if isinstance(asked, str) else asked[-1]["text"]
    if isinstance(prompt, FillPrompt):
        return None, prompt.prefix
    assert isinstance(prompt, TextPrompt), "the command line asks in text"
    return None, prompt.text


def _append(descriptor: int, line: bytes) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(0, "not a file")
    end = os.lseek(descriptor, 0, os.SEEK_END)
    os.lseek(descriptor, max(end - 1, 0), os.SEEK_SET)
    if end and os.read(descriptor, 1) != b"\n":  # a crash left a partial line, so start a new line
        line = b"\n" + line
    try:
        written = os.write(descriptor, line)
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise
    with contextlib.suppress(OSError):  # some file systems do not support fsync
        os.fsync(descriptor)


def _entry(line: bytes) -> Entry | None:
    """Parse a line of the log. Return None if the line is not an entry or lacks a required field."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    texts = ("time", "model", "prompt", "answer", "finish_reason")
    return entry if all(isinstance(entry.get(name), str) for name in texts) else None


def _has(entry: Entry, folded: Sequence[str]) -> bool:
    text = "\n".join(str(entry.get(name) or "") for name in _SEARCHED).casefold() if folded else ""
    return all(word in text for word in folded)
