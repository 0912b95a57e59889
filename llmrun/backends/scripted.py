"""A deterministic stand-in for a model, so that tests of the engine and the command line need no model file.

The logits depend only on the tokens in the sequence and on their LoRA adapters. A `Voice` chooses the next token, and
all logits of other tokens are noise. The vocabulary contains all bytes, a few control tokens, and made-up words. The
backend checks that its caller follows the rules of `backends/base.py`, and raises SeamError otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.backends.base import BLOCK_PART, SavedPart, check_batch
from llmrun.backends.lora_files import LoraOption
from llmrun.backends.scripted_vision import (
    IMAGE_TOKENS,
    TEMPLATE,
    ScriptedVision,
    breach_of_images,
    cached_rows,
    describe_rows,
    open_vision,
)
from llmrun.base.errors import Cancelled, IntegrityError, KVFull, UsageError
from llmrun.base.types import HIDDEN, LOGITS, Adapter, Batch, ModelInfo, Outputs
from llmrun.model.tokenizers.vocabulary import fill_tokens, find_roles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions
    from llmrun.backends.registry import StandIn
    from llmrun.model.tokenizers.vocabulary import FillTokens

# A voice maps a sequence to its next token, or to None for noise. The sequence is a string with one character, chr(id),
# for each token.
Voice = Callable[[str], int | None]

CONTROL_TOKENS = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, END_OF_TEXT, IM_START, IM_END = range(256, 256 + len(CONTROL_TOKENS))
FIRST_WORD = 256 + len(CONTROL_TOKENS)

_MARK = "\ufdd0"  # a Unicode noncharacter, which does not occur in normal text


class ScriptedTokenizer:
    """A tokenizer with a token for each byte.

    Ids 0 to 255 represent the bytes. The control tokens follow, and made-up words (" w0", " w1", ...) fill the rest of
    the vocabulary. The model can generate these words, but `encode` never returns them.

    more_control_tokens  tokens to add after CONTROL_TOKENS, for tests of templates that use other control tokens
    """

    bos_id: int | None = BOS
    eos_id: int | None = IM_END
    end_of_generation = frozenset((END_OF_TEXT, IM_END))

    def __init__(self, vocabulary_size: int = FIRST_WORD, *, more_control_tokens: Sequence[str] = ()) -> None:
        self._controls = (*CONTROL_TOKENS, *more_control_tokens)
        self._first_word = 256 + len(self._controls)
        self.vocabulary_size = max(vocabulary_size, self._first_word)
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control = re.compile("|".join(re.escape(token) for token in longest_first))

    @property
    def fill_tokens(self) -> FillTokens | None:
        """The tokens for fill-in-the-middle, if `more_control_tokens` contains these tokens."""
        ids = {text: 256 + number for number, text in enumerate(self._controls)}
        return fill_tokens(find_roles(ids, {}), BOS)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        ids = self._split(text, str) if parse_special else list(_utf8(text))
        return self._with_bos(ids) if add_special else np.array(ids, np.int32)

    def encode_continuation(self, text: str) -> NDArray[np.int32]:
        return self.encode(text, add_special=False, parse_special=False)

    def protect(self, text: str) -> str:
        doubled = text.replace(_MARK, _MARK * 2)
        return self._control.sub(lambda found: found[0][0] + _MARK + found[0][1:], doubled)

    def unprotect(self, text: str) -> str:
        return re.sub(f"{_MARK}({_MARK}?)", r"\1", text)

    def encode_rendered(self, text: str | Sequence[str | int]) -> NDArray[np.int32]:
        pieces = [text] if isinstance(text, str) else text
        split = [[piece] if isinstance(piece, int) else self._split(piece, self.unprotect) for piece in pieces]
        return self._with_bos([*chain.from_iterable(split)])

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"" if token_id < self._first_word else b" w%d" % (token_id - self._first_word)

    def all_token_bytes(self) -> list[bytes]:
        return list(map(self.token_bytes, range(self.vocabulary_size)))

    def token_text(self, token_id: int) -> str:
        if 256 <= token_id < self._first_word:
            return self._controls[token_id - 256]
        return self.token_bytes(token_id).decode("latin-1")

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes(token) for token in ids)

    def _with_bos(self, ids: list[int]) -> NDArray[np.int32]:
        return np.array(ids if ids[:1] == [BOS] else [BOS, *ids], np.int32)

    def _split(self, text: str, plain: Callable[[str], str]) -> list[int]:
        """Convert control strings to their tokens, and the text between them to bytes after passing it to `plain`."""
        ids: list[int] = []
        end = 0
        for found in self._control.finditer(text):
            ids += _utf8(plain(text[end : found.start()]))
            ids.append(256 + self._controls.index(found[0]))
            end = found.end()
        return ids + list(_utf8(plain(text[end:])))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # A lone surrogate, from an argument in another encoding, becomes "?".


def as_characters(text: str, control_tokens: Sequence[str] = ()) -> str:
    """Convert text to the form that a voice receives: one character, chr(id), for each byte or control token.

    control_tokens  the model's control tokens, in addition to those that every scripted model has
    """
    tokenizer = ScriptedTokenizer(more_control_tokens=control_tokens)
    return "".join(map(chr, tokenizer.encode(text, add_special=False, parse_special=True)))


_USER = as_characters("<|im_start|>user\n")
_ASSISTANT = as_characters("<|im_start|>assistant\n")
_END = as_characters("<|im_end|>")
# Noise logits are at most 8, so at temperature 0.8, a noise token is at most e^-20 times as likely as the scripted
# token.
_SPOKEN_LOGIT = 24.0
HIDDEN_SIZE = 32


DEFAULT_CONTEXT = 8192  # tokens
SAVED_BLOCK = 16  # tokens per saved part
_TOKEN_BITS = 22  # the higher bits of a cached token depend on its adapters


class SeamError(AssertionError):
    """Raised when the caller breaks a rule of the seam."""


def require(condition: bool, breach: str) -> None:
    if not condition:
        raise SeamError(breach)


def echo(history: str) -> int | None:
    """Answer a chat with "You said: " and the last user message. Continue any other text with lowercase letters.

    Images in the message are described (scripted_vision.py).
    """
    before, asked, said = history.rpartition(_ASSISTANT)
    if not asked:
        return b"etaoin shrdlu "[sum(map(ord, history[-3:])) % 14]
    question = before.rpartition(_USER)[2].partition(_END)[0]
    return _next_of("You said: " + describe_rows(question), said)


def scripted_answers(script: Sequence[tuple[str, str]], control_tokens: Sequence[str] = ()) -> Voice:
    """Return a voice that gives scripted answers.

    script  pairs of a cue and its answer

    The voice answers the cue that occurs last in the sequence. The voice produces noise if the sequence contains no
    cue, or if the text after the cue differs from the answer.
    """
    pairs = [(as_characters(cue, control_tokens), as_characters(answer, control_tokens)) for cue, answer in script]

    def voice(history: str) -> int | None:
        at, cue, answer = max((history.rfind(cue), cue, answer) for cue, answer in pairs)
        return None if at < 0 else _next_of(answer, history[at + len(cue) :])

    return voice


def _next_of(answer: str, said: str) -> int | None:
    if not answer.startswith(said):
        return None
    return ord(answer[len(said)]) if len(said) < len(answer) else IM_END


class ScriptedCache:
    """A KVCache that stores the tokens themselves, with a hash of their adapters, instead of keys and values.

    checkpoint  None to keep any prefix exactly. A number N simulates a recurrent model that saves its state every N
                tokens, so truncating or copying n tokens keeps n - n % N of them.
    """

    block_size = 1

    saves_blocks = True
    key = "5c" * 32  # an arbitrary sha256

    def __init__(self, max_sequences: int, capacity: int, checkpoint: int | None) -> None:
        self.capacity = capacity
        self._checkpoint = checkpoint
        self.sequences: list[list[int]] = [[] for _ in range(max_sequences)]

    @property
    def used(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def free_blocks(self) -> int:
        return self.capacity - self.used

    def needed(self, seq: int, n: int) -> int:
        return max(0, n - len(self.sequences[self.checked(seq)]))

    def held(self, sequences: Sequence[int]) -> int:
        return sum(len(self.sequences[self.checked(seq)]) for seq in sequences)

    def copy(self, src: int, dst: int, n: int) -> int:
        require(src != dst, f"cannot copy sequence {src} to itself")
        kept = self._kept(src, n)
        self.sequences[self.checked(dst)] = self.sequences[src][:kept]
        return kept

    def truncate(self, seq: int, n: int) -> int:
        kept = self._kept(seq, n)
        del self.sequences[seq][kept:]
        return kept

    def free(self, seq: int) -> None:
        self.sequences[self.checked(seq)].clear()

    def return_free_memory(self) -> None:
        """Do nothing, because the cache is only a list of tokens."""

    def save(self, seq: int, n: int) -> list[SavedPart]:
        tokens = self.sequences[self.checked(seq)][:n]
        parts = []
        for start in range(0, len(tokens), SAVED_BLOCK):
            data = np.array(tokens[start : start + SAVED_BLOCK], "<i4").tobytes()
            end = start + len(data) // 4
            parts.append(SavedPart(BLOCK_PART, start, end, 0, len(data), partial(bytes, data)))
        return parts

    def load(self, seq: int, parts: Sequence[SavedPart]) -> int:
        self.free(seq)
        if sum(part.end - part.start for part in parts) > self.free_blocks:
            raise KVFull("KV cache is full: no room for the saved tokens")
        tokens = self.sequences[seq]
        with suppress(IntegrityError):  # the positions before a damaged part are still useful
            for part in parts:
                require(part.start == len(tokens), f"a part that begins at {part.start} after {len(tokens)} tokens")
                if part.n_bytes != 4 * (part.end - part.start):
                    raise IntegrityError(f"a saved block has {part.n_bytes} bytes")
                tokens += np.frombuffer(part.read(), "<i4").tolist()
        return self.truncate(seq, len(tokens))

    def checked(self, seq: int) -> int:
        require(0 <= seq < len(self.sequences), f"sequence {seq} is out of range for {len(self.sequences)} sequences")
        return seq

    def _kept(self, seq: int, n: int) -> int:
        length = len(self.sequences[self.checked(seq)])
        require(0 <= n <= length, f"cannot keep {n} tokens of sequence {seq}, which has {length}")
        return n if self._checkpoint is None or n == length else n - n % self._checkpoint


class ScriptedBackend:
    """A Backend without a model.

    voice            chooses the next token; None for pure noise, which gives every token a chance
    vocabulary_size  at least 260; ids from 260 up are the words of ScriptedTokenizer
    capacity         capacity of the cache in tokens, or None for a full context per sequence
    checkpoint       the distance between checkpoints, as in ScriptedCache
    step_seconds     duration of each forward pass, during which `cancel` can stop it
    train_context    the context size that the model was trained for, or None if it equals context_size
    control_tokens   control tokens in addition to those that every scripted model has
    chat_template    the model's chat template, or None to use the default template of its family
    adapters         LoRA adapters, which change the noise
    projector        the file of the projector (scripted_vision.py), or None for a model that reads no images
    image_max_tokens as in OpenOptions
    """

    draft_head = None

    def __init__(
        self,
        voice: Voice | None = echo,
        *,
        path: Path = Path("scripted"),
        vocabulary_size: int = FIRST_WORD,
        context_size: int = DEFAULT_CONTEXT,
        max_sequences: int = 1,
        capacity: int | None = None,
        checkpoint: int | None = None,
        step_seconds: float = 0.0,
        train_context: int | None = None,
        control_tokens: Sequence[str] = (),
        chat_template: str | None = None,
        adapters: Sequence[Adapter] = (),
        projector: Path | None = None,
        image_max_tokens: int | None = None,
    ) -> None:
        self.vision: ScriptedVision | None = None
        if projector is not None:
            self.vision = open_vision(projector, image_max_tokens)
            control_tokens = (*control_tokens, *IMAGE_TOKENS)
            chat_template = TEMPLATE if chat_template is None else chat_template
        self._voice = voice
        self._step_seconds = step_seconds
        self._cancelled = False
        self._closed = False
        self.tokenizer = ScriptedTokenizer(vocabulary_size, more_control_tokens=control_tokens)
        vocabulary_size = self.tokenizer.vocabulary_size
        self._ids = np.arange(vocabulary_size, dtype=np.uint64)
        self.kv = ScriptedCache(max_sequences, capacity or context_size * max_sequences, checkpoint)
        self.info = ModelInfo(
            path=str(path),
            name=path.stem,
            architecture="scripted",
            file_type="none",
            parameters=0,
            file_bytes=0,
            vocabulary_size=vocabulary_size,
            train_context=train_context or context_size,
            context_size=context_size,
            max_sequences=max_sequences,
            backend="scripted",
            device="no model",
            threads=1,
            batch_invariant=True,
            hidden_size=HIDDEN_SIZE,
            adapters=tuple(adapters),
            metadata={} if chat_template is None else {"tokenizer.chat_template": chat_template},
        )
        self.batches: list[Batch] = []  # every batch that was run, for inspection by tests

    def forward(self, batch: Batch) -> Outputs:
        self._check(batch)
        try:
            if self.kv.used + len(batch.tokens) > self.kv.capacity:
                raise KVFull(
                    f"KV cache is full: {self.info.name}: no room for {len(batch.tokens)} more tokens, "
                    f"the limit is {self.kv.capacity}"
                )
            self._sleep(self._step_seconds)
        finally:
            self._cancelled = False
        rows, hidden = [], []
        cached = _numbers_of(batch)
        for token, seq, want in zip(cached, batch.seq.tolist(), batch.want.tolist(), strict=True):
            self.kv.sequences[seq].append(token)
            if want & LOGITS:
                rows.append(self._logits(self.kv.sequences[seq]))
            if want & HIDDEN:
                hidden.append(_hidden(self.kv.sequences[seq]))
        self.batches.append(batch)
        return Outputs(
            np.array(rows, np.float32).reshape(-1, self.info.vocabulary_size),
            np.array(hidden, np.float32).reshape(-1, HIDDEN_SIZE),
        )

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> None:
        self._closed = True

    def _sleep(self, seconds: float) -> None:
        """Sleep for the duration of a pass, or raise Cancelled if the pass is cancelled.

        This method polls a flag instead of waiting for a threading.Event. A signal handler that set an Event could
        deadlock on the Event's lock, because the interrupted thread may hold it.
        """
        end = time.monotonic() + seconds
        while not self._cancelled and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.002))
        if self._cancelled:
            self._cancelled = False
            raise Cancelled("stopped in the middle of a forward pass")

    def _logits(self, tokens: list[int]) -> NDArray[np.float32]:
        digest = hashlib.blake2b(np.array(tokens, "<i4").tobytes(), digest_size=8).digest()
        hashed = self._ids * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(digest, "little"))
        hashed ^= hashed >> np.uint64(29)
        hashed *= np.uint64(0xBF58476D1CE4E5B9)
        logits = (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-21)
        if self._voice is not None:
            spoken = self._voice("".join(chr(token % (1 << _TOKEN_BITS)) for token in tokens))
            if spoken is not None:
                logits[spoken] = _SPOKEN_LOGIT
        return logits

    def _check(self, batch: Batch) -> None:
        require(not self._closed, "forward was called after close")
        n = len(batch.tokens)
        for name, dtype in (("tokens", np.int32), ("seq", np.int32), ("pos", np.int32), ("want", np.uint8)):
            array = getattr(batch, name)
            require(array.shape == (n,) and array.dtype == dtype, f"{name}: {array.dtype}{array.shape}")
        require(batch.scales is None or batch.scales.dtype == np.float32, "scales must be float32")
        breach = breach_of_images(batch, self.vision.projector if self.vision else None)
        require(not breach, breach)
        if batch.embeds is not None:  # the rows of images are checked already
            batch = replace(batch, tokens=np.maximum(batch.tokens, 0), embeds=None, rope_pos=None, ahead=None)
        try:
            check_batch(batch, self.info, list(map(len, self.kv.sequences)))
        except ValueError as breach:
            raise SeamError(str(breach)) from breach


def _numbers_of(batch: Batch) -> list[int]:
    """Return the tokens of a batch as the cache stores them.

    Image rows have other numbers, and the high bits are a hash of the adapters and of positions that are not `pos`.
    """
    tokens: list[int] = batch.tokens.tolist()
    for index, number in cached_rows(batch).items():
        tokens[index] = number
    for rows, usual in ((batch.scales, None), (batch.rope_pos, batch.pos)):
        if rows is not None:
            is_marked = (rows != (0 if usual is None else usual[:, None])).any(1)
            marks = [hashlib.blake2b(row.tobytes(), digest_size=1).digest()[0] for row in rows]
            tokens = [
                token ^ mark << _TOKEN_BITS if marked else token
                for token, mark, marked in zip(tokens, marks, is_marked, strict=True)
            ]
    return tokens


def _hidden(tokens: list[int]) -> NDArray[np.float32]:
    """Return a hidden state that depends on how often each token occurs, so similar texts have similar states."""
    hidden = np.zeros(HIDDEN_SIZE, np.float32)
    np.add.at(hidden, np.array(tokens) % HIDDEN_SIZE, 1.0)
    return hidden


class ScriptedStandIn:
    """The StandIn that the registry uses for "scripted"."""

    def open(self, path: Path, options: OpenOptions) -> ScriptedBackend:
        """Open the echoing backend or, for a .json file, the backend that the file describes.

        The file contains an object with an optional list "answers" of [cue, answer] pairs, and any of ScriptedBackend's
        keyword arguments. Raises UsageError if the file is not valid.
        """
        asked: dict[str, Any] = {"max_sequences": options.max_sequences + options.cached_prefixes}
        loras = [LoraOption.parse(text) for text in options.adapters]
        asked["adapters"] = [Adapter(lora.name, str(lora.path), lora.scale, (), lora.name) for lora in loras]
        if isinstance(options.kv_tokens, int):
            asked["capacity"] = options.kv_tokens
        if options.context_size:
            asked["context_size"] = options.context_size
        if options.mmproj:
            asked |= {"projector": Path(options.mmproj), "image_max_tokens": options.image_max_tokens}
        if path.suffix != ".json":
            return ScriptedBackend(path=path, **asked)
        try:
            script = json.loads(path.read_text(encoding="utf-8"))
            controls = script.get("control_tokens", ())
            voice = scripted_answers(script.pop("answers"), controls) if "answers" in script else echo
            return ScriptedBackend(voice, path=path, **{**script, **asked})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"invalid script for the scripted backend: {path}: {error}") from error


KIND: StandIn = ScriptedStandIn()
