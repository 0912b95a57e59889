"""The protocol between llmrun and the process that runs llama.cpp: lines of text, and arrays in shared memory.

Requests and answers are numbered lines of JSON. Forward passes use a plain format instead, because the weights have
just evicted the code and tables of the JSON parser from the CPU caches. The plain format, which also has fewer checks,
reduced the time between two forward passes from 820 to 690 us (135M parameters, 7 ms per token).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import sys
import time
from math import prod
from typing import Any

# This line wakes the reader shortly before the answer arrives. Otherwise, the reader would not be scheduled until the
# writer goes to sleep. With one thread on each of two processors, waking the reader early reduced the time between two
# forward passes from 690 us (568 to 719) to 485 us (462 to 529). With a single thread, the time did not change.
NEARLY = b"nearly\n"
_FORWARD = b"forward "
_FORWARD_FIELDS = ("rows", "wanted", "hidden", "images")
_DONE = b"done "
_WATCHED_S = 0.0005  # seconds, slightly more than the 0.3 ms between two tokens


class WrongLibrary(RuntimeError):
    """A llama.cpp library that does not match llama-cpp-python. The message is the difference."""


def request_line(operation: str, number: int, fields: dict[str, Any]) -> bytes:
    """Encode a request. The fields of "forward" are those in `_FORWARD_FIELDS`."""
    if operation == "forward":
        return b"%s%d %d %d %d %d\n" % (_FORWARD, number, *(fields[name] for name in _FORWARD_FIELDS))
    return json.dumps({"do": operation, "number": number, **fields}).encode() + b"\n"


def read_request(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """Decode a request into its operation, number and fields. Returns None if the line is incomplete."""
    try:
        if line.startswith(_FORWARD):
            number, *values = map(int, line.split()[1:])
            return "forward", number, dict(zip(_FORWARD_FIELDS, values, strict=True))
        fields = json.loads(line)
        return fields.pop("do"), fields.pop("number"), fields
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def answer_line(number: int, answer: dict[str, Any]) -> bytes:
    """Encode an answer. The answer to a successful forward pass, {"status": 0}, is sent without JSON."""
    if answer == {"status": 0}:
        return b"%s%d\n" % (_DONE, number)
    return json.dumps({"number": number, **answer}).encode() + b"\n"


def read_answer(line: bytes) -> dict[str, Any]:
    """Decode an answer, including its "number". Returns {} if the line is not a complete answer."""
    try:
        if line.startswith(_DONE):
            return {"number": int(line[len(_DONE) :]), "status": 0}
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def read_soon(descriptor: int) -> bytes:
    """Read from a pipe, polling briefly for data before blocking.

    Use this function if data is expected soon, because a blocked process wakes up late: after 50 to 110 us on a virtual
    machine whose processor had gone idle.
    """
    if sys.platform != "win32":
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        end = time.monotonic() + _WATCHED_S
        while not waiting.poll(0) and time.monotonic() < end:
            pass
    return os.read(descriptor, 1 << 16)


PAGE = mmap.ALLOCATIONGRANULARITY


class SharedMemory:
    """An anonymous, growable file that a process and its child both map.

    The child attaches the file by its `handle`, which is an inherited file descriptor, or a name on Windows, where
    descriptors are not inherited. Only pages with written data use memory.
    """

    def __init__(self, handle: str) -> None:
        self.handle = handle

    @classmethod
    def create(cls) -> SharedMemory:
        if sys.platform == "win32":
            import secrets  # Like tempfile below, secrets is imported late because the child does not need the module.

            return cls(f"llmrun-{os.getpid()}-{secrets.token_hex(8)}")
        if hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid the system call
                return cls(str(os.memfd_create("llmrun")))
        import tempfile

        with tempfile.TemporaryFile() as file:
            return cls(str(os.dup(file.fileno())))

    @property
    def inherited(self) -> tuple[int, ...]:
        """The file descriptors that the child must inherit."""
        return () if sys.platform == "win32" else (int(self.handle),)

    def map(self, n_bytes: int) -> mmap.mmap:
        """Map the first n bytes of the file. A mapping stays valid when a longer mapping is created later."""
        if sys.platform == "win32":
            # A shared memory region cannot grow on Windows, so each length has its own region.
            return mmap.mmap(-1, n_bytes, tagname=f"{self.handle}-{n_bytes}")
        descriptor = int(self.handle)
        if os.fstat(descriptor).st_size < n_bytes:
            os.ftruncate(descriptor, n_bytes)
        return mmap.mmap(descriptor, n_bytes)

    def close(self) -> None:
        """Close the file. Existing mappings stay valid. Calls after the first have no effect."""
        if self.handle and sys.platform != "win32":
            os.close(int(self.handle))
        self.handle = ""


def rounded_to_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE) * PAGE


# The first page contains the abort flag: two bytes that `strlen` reads. This page stays mapped while the process runs.
FLAG_BYTES = PAGE

# Maximum number of rows whose logits or hidden states a llama_decode call returns. llama.cpp reserves space for the
# logits of all these rows in its compute buffer. For llama.cpp's default of 512 rows, the logits take half a gigabyte
# with a vocabulary of 262,144 tokens. The engine needs the logits of only one row per sequence.
MOST_WANTED = 64

# The kinds of rows in a forward pass, because llama.cpp does not accept tokens and embeddings in one batch.
TOKENS, CAUSAL_IMAGES, WHOLE_IMAGE = 0, 1, 2

# The words in a saved sequence: before the first cell, and in each cell, as described in kv_cache.py.
CELLS_START, MROPE_CELL = 4, 6

PLANES = 4  # positions of an image's row in models with M-RoPE: time, height, width, and one that is always 0

CONTEXT_STEP = 256  # tokens; llama.cpp rounds its context size up to a multiple of this number


class Layout:
    """The byte offsets of the shared arrays: a forward pass's inputs and results, and the length of each sequence.

    rows             maximum number of rows in a pass
    vocabulary_size  logits per row
    max_sequences    number of sequence lengths
    hidden_size      features of a hidden state
    encodes          whether passes return the hidden states of all rows, and never logits
    row_width        numbers per row of an image, or 0 if the model reads no images
    most_wanted      maximum number of rows whose results a pass returns
    """

    def __init__(
        self,
        rows: int,
        vocabulary_size: int,
        max_sequences: int,
        hidden_size: int,
        encodes: bool = False,
        row_width: int = 0,
    ) -> None:
        self.rows, self.max_sequences, self.hidden_size, self.encodes = rows, max_sequences, hidden_size, encodes
        self.vocabulary_size, self.row_width = vocabulary_size, row_width
        self.most_wanted = rows if encodes else MOST_WANTED
        self.logits_shape = self.most_wanted, 0 if encodes else vocabulary_size
        self.tokens = FLAG_BYTES
        self.sequences = self.tokens + 4 * rows
        self.positions = self.sequences + 4 * rows
        self.lengths = self.positions + 4 * rows * (PLANES if row_width else 1)
        self.wanted = self.lengths + 4 * max_sequences
        self.logits = rounded_to_pages(self.wanted + rows)
        self.hidden = rounded_to_pages(self.logits + 4 * prod(self.logits_shape))
        self.embeds = rounded_to_pages(self.hidden + 4 * self.most_wanted * hidden_size)
        self.n_bytes = rounded_to_pages(self.embeds + 4 * rows * row_width)
