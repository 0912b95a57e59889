"""The interface between the engine and its backends, called the seam: Backend, KVCache and OpenOptions.

A backend receives token ids and returns logits or hidden states. The options that divide a model among devices are
parsed here, and not in backends/llama, because every command reads the settings, which check these options.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from llmrun.base.sampling_texts import ListOfTexts
from llmrun.base.types import HIDDEN, IMAGE_ROW, LOGITS, Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.base.types import ModelInfo, Outputs
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer
    from llmrun.model.vision.layout import ImageLayout, Projector

BLOCK_PART: Final = "block"
CHECKPOINT_PART: Final = "checkpoint"
SEQUENCE_PART: Final = "sequence"

CHECKPOINT_DISTANCE: Final = 512  # tokens between regular checkpoints of a recurrent state


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of the data that a backend stores for a sequence.

    kind      BLOCK_PART: keys and values of the positions from `start` to `end`. CHECKPOINT_PART: the recurrent state
              after the first `end` positions, with `start` equal to `end`. SEQUENCE_PART: everything about the first
              `end` positions
    contents  a number that describes the contents to the backend
    n_bytes   the size of the data
    read      returns the data, or raises IntegrityError if the part is loaded from a file whose data is damaged
    """

    kind: str
    start: int
    end: int
    contents: int
    n_bytes: int
    read: Callable[[], memoryview | bytes | bytearray]


def identity_of(file: GGUFFile) -> list[str | int]:
    """Return the entries of a key that identify a model: its sampled digest and the modification time of its file.

    The samples may miss a change of a few weights, but any change updates the modification time.
    """
    from llmrun.formats.gguf.reader import sampled_digest

    return [sampled_digest(file), file.path.stat().st_mtime_ns]


def key_of(decisive: dict[str, Any]) -> str:
    """Return the sha256, in hexadecimal, of everything that determines the meaning and the values of saved parts."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


SPLIT_MODES: Final = ("layer", "row", "none")  # how llama.cpp divides a model among devices; "layer" is the default
MOST_DEVICES: Final = 15  # besides the CPU; ggml's scheduler supports 16 backends (GGML_SCHED_MAX_BACKENDS)
RPC_OFF: Final = "off"  # use no servers, even if the environment or config.toml lists some
DEFAULT_PORT: Final = 50052  # the default port of llama.cpp's ggml-rpc-server

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?")


@functools.lru_cache(maxsize=16)
def parse_rpc_servers(text: str) -> tuple[str, ...]:
    """Return the servers in a list such as "10.0.0.2:50052,box:50052". Raises ValueError naming the invalid part."""
    servers = [part.strip(" ") for part in text.split(",")]
    for server in servers:
        host, _, port = server.rpartition(":")
        if not _HOST.fullmatch(host) or not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
            raise ValueError(server)
    return tuple(servers)


def _server_advice(text: str) -> str:
    try:
        parse_rpc_servers(text)
    except ValueError as error:
        server = str(error)
        if server.count(":") > 1:
            return "llama.cpp's RPC supports only IPv4: use a host name or an IPv4 address"
        if _HOST.fullmatch(server):
            return f"add the port, as in {server}:{DEFAULT_PORT}"
        return f"{server[:60]!r} is not HOST:PORT"
    return ""


@functools.lru_cache(maxsize=16)
def parse_tensor_split(text: str) -> tuple[float, ...]:
    """Return the proportions in a list such as "3,1". Raises ValueError."""
    parts = tuple(float(part) for part in text.split(","))
    if not all(math.isfinite(part) and part >= 0 for part in parts) or not any(parts):
        raise ValueError(text)
    return parts


RPC_SERVERS: Final = ListOfTexts(
    lambda text: () if text == RPC_OFF else parse_rpc_servers(text),
    f"{RPC_OFF} or a list of servers, as in 10.0.0.2:{DEFAULT_PORT},10.0.0.3:{DEFAULT_PORT}",
    _server_advice,
)
TENSOR_SPLIT: Final = ListOfTexts(
    lambda text: [str(part) for part in parse_tensor_split(text)],
    "a list of proportions, as in 3,1",
    lambda text: "give one number for each device, not all of them 0",
)


def check_batch(batch: Batch, info: ModelInfo, lengths: Sequence[int], row_width: int = 0) -> None:
    """Check that a batch's tokens, sequences and positions are in range. Raises ValueError.

    Native code uses these numbers as memory indexes, so it must never receive an invalid batch.

    lengths    current number of tokens in each sequence
    row_width  numbers per row of an image, or 0 if the backend takes no images
    """
    # Plain lists are faster: for a decode step, which has a single row, NumPy reductions take eight times as long.
    tokens, sequences, positions = batch.tokens.tolist(), batch.seq.tolist(), batch.pos.tolist()
    if not tokens:
        raise ValueError("a batch needs at least one row")
    if batch.embeds is None:
        least = min(tokens)
    else:
        _check_images(batch, tokens, sequences, row_width)
        least = min((token for token in tokens if token != IMAGE_ROW), default=0)
    if least < 0 or max(tokens) >= info.vocabulary_size:
        raise ValueError(f"token ids must be 0 to {info.vocabulary_size - 1}")
    if min(sequences) < 0 or max(sequences) >= info.max_sequences:
        raise ValueError(f"sequences must be 0 to {info.max_sequences - 1}")
    if batch.scales is not None and (
        batch.scales.shape != (len(tokens), len(info.adapters)) or not all(map(math.isfinite, batch.scales.flat))
    ):
        raise ValueError(f"scales must be {len(tokens)} x {len(info.adapters)} finite numbers")
    if batch.rope_pos is not None and (
        batch.rope_pos.shape != (len(tokens), 3)
        or batch.rope_pos.min() < 0
        or (batch.rope_pos > batch.pos[:, None]).any()
    ):
        raise ValueError(f"RoPE positions must be {len(tokens)} x 3 numbers from 0 to the row's position")
    following = list(lengths)
    for seq, position in zip(sequences, positions, strict=True):
        if position != following[seq]:
            raise ValueError(f"sequence {seq} continues at position {following[seq]}, not {position}")
        following[seq] += 1
    if not info.has_logits and (batch.want & LOGITS).any():
        raise ValueError("this model has no logits, only hidden states")
    if not info.hidden_size and (batch.want & HIDDEN).any():
        raise ValueError(f"the {info.backend} backend has no hidden states of this model")
    if max(following) > info.context_size:
        raise ValueError(f"a sequence of {max(following)} tokens does not fit in a context of {info.context_size}")


def _check_images(batch: Batch, tokens: Sequence[int], sequences: Sequence[int], row_width: int) -> None:
    """Check the rows of images in a batch that has some. Raises ValueError."""
    count = tokens.count(IMAGE_ROW)
    if not row_width:
        raise ValueError("this backend takes no rows of images")
    if batch.embeds is None or batch.embeds.shape != (count, row_width) or not count:
        raise ValueError(f"embeddings must be {count} x {row_width} numbers, and at least one row")
    if batch.ahead is None:
        return
    ahead = batch.ahead.tolist()
    if len(ahead) != len(tokens) or ahead[-1] != 0 or min(ahead) < 0:
        raise ValueError("each row can attend only to rows of its batch")
    for row, following in enumerate(ahead):
        if following and (
            ahead[row + 1] != following - 1
            or sequences[row + 1] != sequences[row]
            or not tokens[row] == tokens[row + 1] == IMAGE_ROW
        ):
            raise ValueError("the rows that an image's row attends to must follow it, up to the image's last row")


AUTO: Final = "auto"  # the value that selects the best backend, or as many GPU layers as fit

TRAINED_CONTEXT: Final = 0  # the context size that stands for the model's trained context, as in llama.cpp

# The maximum number of rows that an answer has in a step: its last token and a draft. Every row may require logits.
ROWS_PER_ANSWER: Final = 16

Progress = Callable[[str, float], None]  # called with a description of the current work and the fraction completed


def _discard(value: object) -> None:
    """Ignore an explanation or a tokenizer that a backend reports."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The options for opening a model. The command line creates this object, and the engine passes it to the backend.

    backend        a name in the registry, or "auto"
    context_size   maximum tokens per sequence, TRAINED_CONTEXT, or None for a default that fits (sizing.py)
    max_sequences  maximum number of requests that run at a time
    kv_tokens      tokens in the KV cache, which all sequences share: a number, None for one context per sequence, or
                   "auto" for as many tokens as fit, from one context to one context per sequence
    cached_prefixes  number of additional sequences that keep prefixes of finished requests; backends create fewer if
                   each sequence needs memory of its own
    threads        number of threads, or None for one thread per physical core
    kv_type        precision of the KV cache, in the notation of layouts/kv.py, or None for the backend's default
    reserved_memory  bytes of free memory to leave for other uses, such as a cache that another model has not filled yet
    gpu_layers     layers to run on GPUs: a number, "all", or "auto" for as many as fit; ignored by CPU-only backends
    tensor_split   the share of the GPU layers for each device, as in "3,1", or "" to follow the free memory
    split_mode     how to divide a model among devices, one of SPLIT_MODES
    main_gpu       the number of the device that runs all layers if `split_mode` is "none"
    rpc            llama.cpp's RPC servers, as in "10.0.0.2:50052,box:50052", whose devices are used like GPUs
    rpc_anyway     allow RPC servers at addresses that are not private
    keeps_rows     always keep the last 16 tokens removable, which a draft model requires; models with a recurrent state
                   then run each step more slowly
    draft_head     load the model's draft head, if the backend supports the head
    saves_state    allow KVCache.save and KVCache.load, which need a key that takes a few milliseconds to compute
    text_calls     as in Engine
    adapters       LoRA adapters that requests can use, each in the notation of --lora: [NAME=]FILE[:SCALE]
    mmproj         the path of the projector's file, which makes the model read images, or ""
    image_min_tokens, image_max_tokens  how many tokens an image should have; None for the values of its family
    progress       called with the progress of loading or compiling
    explain        called with a short text that reports which backend "auto" chose, and why
    on_header      called with the file's header before the weights are read; may raise an error to refuse the file
    on_tokenizer   may be called with the tokenizer once it is loaded, while the weights are still being read
    """

    backend: str = AUTO
    context_size: int | None = None
    max_sequences: int = 1
    kv_tokens: int | str | None = None
    cached_prefixes: int = 0
    threads: int | None = None
    kv_type: str | None = None
    reserved_memory: int = 0
    gpu_layers: int | str = AUTO
    tensor_split: str = ""
    split_mode: str = SPLIT_MODES[0]
    main_gpu: int | None = None
    rpc: str = ""
    rpc_anyway: bool = False
    keeps_rows: bool = False
    draft_head: bool = False
    saves_state: bool = False
    text_calls: bool = True
    adapters: Sequence[str] = ()
    mmproj: str = ""
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    progress: Progress | None = None
    explain: Callable[[str], None] = _discard
    on_header: Callable[[GGUFFile], None] = _discard
    on_tokenizer: Callable[[Tokenizer], None] = _discard

    def portable(self) -> dict[str, Any]:
        """Return the fields that can be sent to another process, which are all but the callbacks."""
        callbacks = ("progress", "explain", "on_header", "on_tokenizer")
        portable = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in callbacks}
        return {**portable, "adapters": [*self.adapters]}

    def without_gpus(self) -> OpenOptions:
        """Return a copy of these options that puts no layers on a GPU."""
        return replace(self, gpu_layers=0)

    def without_rpc(self) -> OpenOptions:
        """Return a copy of these options that uses only devices of this machine, divided in the default way."""
        if not self.rpc:
            return self
        return replace(self, rpc="", tensor_split="", split_mode=SPLIT_MODES[0], main_gpu=None)


class KVCache(Protocol):
    """The keys and values that a backend stores for each sequence, to avoid computing the same prefix twice.

    `copy` and `truncate` return `kept` (<= n), the length of the prefix that is still valid. This prefix can be shorter
    than requested because a sliding window or a recurrent state may have discarded older tokens. The engine prefills
    the rest of the tokens.
    """

    @property
    def capacity(self) -> int:
        """The total number of tokens that the cache can hold across all sequences."""

    @property
    def block_size(self) -> int:
        """The number of tokens in a block, the unit in which the cache allocates memory."""

    @property
    def free_blocks(self) -> int:
        """A lower bound on the number of blocks that no sequence holds, which can be negative."""

    def needed(self, seq: int, n: int) -> int:
        """Return an upper bound on the number of free blocks that a sequence needs to grow to n tokens."""

    def held(self, sequences: Sequence[int]) -> int:
        """Return a lower bound on the number of blocks that would become free if these sequences were freed."""

    def copy(self, src: int, dst: int, n: int) -> int:
        """Replace the contents of sequence dst with the first n tokens of src, and return the number of tokens kept."""

    def truncate(self, seq: int, n: int) -> int:
        """Shorten a sequence to its first n tokens, and return the number of tokens kept."""

    def free(self, seq: int) -> None:
        """Remove all tokens of a sequence."""

    def return_free_memory(self) -> None:
        """Return the memory of free blocks to the system, if the backend can. It is allocated again when needed."""

    @property
    def key(self) -> str:
        """The hash of everything that determines the contents of saved parts, such as the model and the KV type.

        The key is empty unless `OpenOptions.saves_state` was set. Parts must not be saved or loaded under an empty key.
        """

    @property
    def saves_blocks(self) -> bool:
        """True if saving a longer sequence adds new parts, or False if the whole sequence becomes one new part."""

    def save(self, seq: int, n: int) -> list[SavedPart]:
        """Return parts from which the first n tokens of a sequence can be loaded later, in order of position.

        The data of the parts is read on demand, which must happen before the sequence changes. Some backends can
        only save all tokens of a sequence, even if n is smaller.
        """

    def load(self, seq: int, parts: Sequence[SavedPart]) -> int:
        """Replace a sequence with parts that were saved under the same key, and return the number of tokens kept.

        The sizes of the parts are checked. Only the positions before a damaged part are loaded. Raises KVFull, and
        leaves the sequence empty, if there is no room for all parts.
        """


class DraftHead(Protocol):
    """The part of a model that predicts the token after the next token (multi-token prediction).

    A row is a token at its position, together with the model's hidden state at the position before. The head has its
    own cache, with the same capacity as the model's cache.
    """

    @property
    def info(self) -> ModelInfo:
        """The model's information."""

    @property
    def kv(self) -> KVCache: ...

    @property
    def drafted_tokens(self) -> int:
        """The number of tokens, counted from the start of the vocabulary, whose logits the head computes."""

    def forward(self, batch: Batch, hidden: NDArray[np.float32]) -> Outputs:
        """Run one forward pass of at most 256 rows.

        hidden  float32[rows, hidden size], the hidden state of each row

        Returns logits float32[rows that want LOGITS, drafted_tokens] for the token after each row's token, and the
        head's own hidden states, which replace the model's hidden states at the positions of the rows. Raises the
        errors of `Backend.forward`.
        """

    def cancel(self) -> None:
        """Stop a forward pass in the same way as `Backend.cancel`."""


class Encoding(Protocol):
    """An image that is being encoded. The engine advances it between steps, so that other answers continue."""

    @property
    def progress(self) -> float:
        """The fraction of the work that is done, or 0 if unknown."""

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        """Encode, or wait for the encoder, for about this many seconds.

        Encoders that have no process of their own encode at least one tile of rows, even with 0, which takes up to
        about 0.2 seconds. Others only check if the image is encoded.

        Returns the embeddings, float32[layout.rows, projector.row_width], or None until they are complete. Raises
        Cancelled after `cancel`, and LlmrunError if the encoder fails, which concerns only this image.
        """

    def cancel(self) -> None:
        """Stop encoding soon. Thread-safe and idempotent. The next call of `advance` frees what the encoding needs."""


class Vision(Protocol):
    """The encoder of a model that reads images."""

    @property
    def projector(self) -> Projector:
        """The projector, as the header of its file describes it."""

    @property
    def runs_apart(self) -> bool:
        """True if the encoder has a process of its own, which also works between the calls of `Encoding.advance`."""

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> Encoding:
        """Begin to encode an image. At most one image is being encoded at a time.

        tiles  uint8[height, width, 3], the boxes of the layout in their order
        """

    def expected_seconds(self, layout: ImageLayout) -> float | None:
        """Return how long encoding an image of this layout will probably take, or None if unknown. Quick."""

    def close(self) -> None:
        """End the encoder's process or threads. Called by the backend's `close`. Idempotent."""


class Backend(Protocol):
    """An open model."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def draft_head(self) -> DraftHead | None:
        """The model's draft head, or None if the model has no draft head or `OpenOptions.draft_head` was not set."""

    @property
    def vision(self) -> Vision | None:
        """The vision encoder, or None if `OpenOptions.mmproj` is empty."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def kv(self) -> KVCache: ...

    def forward(self, batch: Batch) -> Outputs:
        """Run one forward pass and return what the batch wants. The caller owns the arrays.

        Raises KVFull, before anything changes, if the cache has no room. Raises Cancelled if `cancel` was called since
        the last pass ended. After either error, each sequence is restored to its state before the pass. Some backends
        can restore only a prefix of a sequence, so call `kv.truncate` with the former length, and use its result.
        """

    def cancel(self) -> None:
        """Stop the running forward pass, or the next pass if none is running. Each call stops at most one pass.

        Other threads and signal handlers can call this method, although they cannot know whether a pass is about to
        start. The pass may already have finished, so callers must also record that they want to stop. A pass that was
        stopped by mistake can safely be repeated.
        """

    def close(self) -> None:
        """Stop the workers and free all resources. Only `close` may be called again afterwards."""


def beyond_training(name: str, context: int, trained: int) -> str:
    """Return a warning if the context is longer than the model was trained for, or an empty string otherwise.

    context  context size in tokens
    trained  context size in tokens that the model was trained for, or 0 if unknown
    """
    if not 0 < trained < context:
        return ""
    return f"{context:,} tokens of context: {name} was trained for {trained:,}, and output may get worse beyond that"
