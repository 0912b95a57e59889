"""The child process that runs llama.cpp: `python -m llmrun.backends.llama.worker HANDLE HANDLE`.

llama.cpp aborts its process when an assertion fails, and the system kills it when a mapped file is truncated. Running
llama.cpp in a child process limits the damage, and the parent can report what happened. Each request is a line on
standard input, and each answer is a line on the original standard output (messages.py). Tokens, logits and saved
sequences (memory_transfers.py) are in shared memory.

The worker uses only the ctypes declarations from llama-cpp-python, so it starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmrun.backends.llama.log import GpuProblem, why_no_gpu
from llmrun.backends.llama.memory_transfers import MemoryReceiver
from llmrun.backends.llama.messages import (
    CONTEXT_STEP,
    FLAG_BYTES,
    NEARLY,
    TOKENS,
    WHOLE_IMAGE,
    Layout,
    SharedMemory,
    WrongLibrary,
    answer_line,
    read_request,
    read_soon,
)
from llmrun.backends.llama.positions import Positions
from llmrun.backends.llama.probe import LIBRARY_FOLDER
from llmrun.backends.llama.rpc_devices import (
    add_rpc_server,
    keep_connections_alive,
    supports_gpus,
    supports_rpc,
    usable_gpus,
    vulkan_starts,
)
from llmrun.backends.llama.state_checkpoints import StateCheckpoints
from llmrun.base.processes.worker import take_over_streams
from llmrun.base.stacks import USUAL_STACK, on_stack
from llmrun.formats.layouts.kv import parse_kv_type

if TYPE_CHECKING:
    import mmap


def _requests_from(descriptor: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    unread = bytearray()
    while data := read_soon(descriptor):
        unread += data
        if b"\n" not in data:
            continue
        *lines, rest = bytes(unread).split(b"\n")
        unread = bytearray(rest)
        for line in lines:
            request = read_request(line)
            if request is not None:
                yield request


def serve(answer: Callable[[int, str, int, dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the parent closes the pipe.

    answer  handles a request, given the pipe for answers, the operation, the request's number and its fields
    """
    requests, answers = take_over_streams()
    for operation, number, fields in _requests_from(requests):
        try:
            answered = answer(answers, operation, number, fields)
        except WrongLibrary as error:
            answered = {"wrong": str(error)}
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            answered = {"broken": f"{type(error).__name__}: {error}"}
        os.write(answers, answer_line(number, answered))


# llama.cpp splits most text with std::regex, which recurses for every character of a match and uses 326 bytes of stack
# each time. With an 8 MiB stack, a run of 25,000 dots crashes the process.
_STACK_OF_A_BYTE = 1024
_SHORT_TEXT = 4096
_MOST_STACK = 1 << 30


_INFO, _WARNING, _ERROR = 2, 3, 4  # ggml log levels
_KEPT_LINES = 400
_LONGEST_LINE = 1000
_BATCH_ROWS = 512  # llama.cpp's default
_PROGRESS_STEPS = 50
_ALL = 0  # the flags for saving all data of a sequence


def main(kind: Callable[[SharedMemory, MemoryReceiver, int], Worker]) -> None:
    """Handle the parent's requests with a worker of this kind, which is created for the first request."""
    worker: Worker | None = None

    def answer(answers: int, operation: str, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        nonlocal worker
        if worker is None:
            worker = kind(SharedMemory(sys.argv[1]), MemoryReceiver(sys.argv[2]), answers)
        worker.number = number
        found: dict[str, Any] = getattr(worker, f"do_{operation}")(**fields)
        return found

    serve(answer)


class Worker:
    """Handles requests with llama.cpp, and keeps the end of its log.

    Each `do_*` method handles one operation and returns the fields of its answer. `number` identifies the request.
    """

    number = 0

    def __init__(self, memory: SharedMemory, transfers: MemoryReceiver, answers: int) -> None:
        self._answers = answers
        self._memory = memory
        self._transfers = transfers
        self._flag = memory.map(FLAG_BYTES)
        self._llama = declarations()
        self._lines: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        # Keep a reference to the callback while llama.cpp may call it. Calling a collected callback would crash.
        self._log = self._llama.llama_log_callback(self._take_log_line)
        self._llama.llama_log_set(self._log, ctypes.c_void_p(0))
        self._llama.llama_backend_init()

    def do_rest(self) -> dict[str, Any]:
        """Do nothing. The answer confirms to the parent that all earlier requests are done."""
        return {}

    def _transferred(self, memory: str, n_bytes: int) -> Any:
        """Return memory that the parent shares (memory_transfers.py) as an array, uint8[n_bytes]."""
        return (ctypes.c_uint8 * n_bytes).from_buffer(self._transfers.map(memory, n_bytes))

    def _without_devices(self, parameters: Any) -> None:
        """Use no GPUs for a model. Without an empty device list, a GPU build would still allocate memory on each."""
        self._no_devices = (ctypes.c_void_p * 1)(None)  # kept while llama.cpp reads it
        parameters.n_gpu_layers = 0
        parameters.devices = ctypes.cast(self._no_devices, ctypes.c_void_p)

    def _take_log_line(self, level: int, text: bytes, data: Any) -> None:
        if level in (_INFO, _WARNING, _ERROR):  # Skip hundreds of debug lines and the dots of a progress bar.
            self._lines.append((level, text.decode(errors="replace")[:_LONGEST_LINE].rstrip("\n")))
        if level == _ERROR:
            os.write(2, text)  # The parent keeps the end of this stream, even if llama.cpp aborts now.

    def _failure(self, otherwise: str) -> dict[str, Any]:
        return {"failed": self._last_error() or otherwise, "log": self._log_lines()}

    def _log_lines(self) -> list[str]:
        return [line for _, line in self._lines]

    def _last_error(self) -> str:
        """Return the first error line in the log. llama.cpp reports the cause first and more general errors later."""
        errors = [line for level, line in self._lines if level == _ERROR and line.strip()]
        return errors[0] if errors else ""


class LlamaWorker(Worker):
    """Runs models, at most one of which is open at a time."""

    _gives_hidden = 0  # true if the context computes hidden states

    def __init__(self, memory: SharedMemory, transfers: MemoryReceiver, answers: int) -> None:
        super().__init__(memory, transfers, answers)
        self._has_servers = False
        self._model: Any = None
        self._context: Any = None
        self._cache: Any = None
        self._mapping: mmap.mmap | None = None

    def do_devices(self) -> dict[str, Any]:
        """Return the GPUs with their free memory, or the reason why there are no GPUs, if known."""
        # ggml is called through the loaded llama.cpp library. A second copy of ggml would have its own list of devices.
        devices = usable_gpus(self._llama._lib)
        offloads = supports_gpus(self._llama._lib) or bool(devices)
        why = GpuProblem()
        if offloads and not devices:
            why = why_no_gpu("\n".join(self._log_lines()), vulkan_starts(self._llama._lib))
        return {"offloads": offloads, "devices": devices, "why_none": why.cause, "advice": why.advice}

    def do_describe(self) -> dict[str, Any]:
        """Return llama.cpp's build information and the GPUs it can use."""
        system = self._llama.llama_print_system_info().decode(errors="replace")
        return {"system": system, "rpc": supports_rpc(self._llama._lib), **self.do_devices()}

    def do_add_rpc_server(self, address: str) -> dict[str, Any]:
        """Connect to an RPC server, use its devices from now on, and return their number."""
        self._has_servers = True
        return {"devices": add_rpc_server(self._llama._lib, address)}

    def do_open(
        self,
        path: str,
        gpu_layers: int,
        cache_tokens: int,
        max_sequences: int,
        threads: int,
        kv_type: str,
        rows: int,
        vocabulary_size: int,
        hidden_size: int,
        tensor_split: Sequence[float] = (),
        split_mode: str = "layer",
        main_gpu: int = 0,
        encodes: bool = False,
        ranks: bool = False,
        row_width: int = 0,
        batch_rows: int = _BATCH_ROWS,
    ) -> dict[str, Any]:
        """Load a model and create a context. If loading fails, the answer's `failed` is llama.cpp's error message.

        encodes  whether the model has no causal mask, so that a pass must contain all rows of a sequence
        ranks    whether the hidden state of a sequence's last row in a pass is the output of the classification head
        row_width   numbers per row of an image, or 0 if the model reads no images
        batch_rows  the most rows that llama.cpp computes at a time
        """
        self.do_close()
        self._lines.clear()
        if not self._load(path, gpu_layers, tensor_split, split_mode, main_gpu):
            return self._failure("no reason given")
        llama = self._llama
        vocabulary = llama.llama_model_get_vocab(self._model)
        found = llama.llama_vocab_n_tokens(vocabulary)
        if found != vocabulary_size:
            return {"failed": f"a vocabulary of {found} tokens, expected {vocabulary_size}", "log": []}
        width = (llama.llama_model_n_cls_out if ranks else llama.llama_model_n_embd_out)(self._model)
        if width != hidden_size:
            return {"failed": f"hidden states of {width} features, expected {hidden_size}", "log": []}
        self._layout = Layout(rows, vocabulary_size, max_sequences, hidden_size, encodes, row_width)
        self._ranks = ranks
        if not self._make_context(gpu_layers, cache_tokens, threads, kv_type, batch_rows):
            return self._failure("it could not create a context")
        self._mapping = self._memory.map(self._layout.n_bytes)
        self._make_batch(rows)
        # The lengths are in shared memory, so the parent can read the lengths without waiting for an answer.
        self._lengths = (ctypes.c_int32 * max_sequences).from_address(_address(self._mapping) + self._layout.lengths)
        self._lengths[:] = [0] * max_sequences
        rope = llama.llama_model_rope_type(self._model)
        mrope = rope in (llama.LLAMA_ROPE_TYPE_MROPE, llama.LLAMA_ROPE_TYPE_IMROPE)
        self._positions = Positions(max_sequences, images=mrope and row_width > 0)
        self._checkpoints = StateCheckpoints(llama, self._model, self._context, max_sequences)
        return {
            "cache_tokens": llama.llama_n_ctx(self._context),
            "window": llama.llama_model_n_swa(self._model),
            "recurrent": llama.llama_model_is_recurrent(self._model),
            "mrope": mrope,
            "remembers": bool(self._cache),
            "system": llama.llama_print_system_info().decode(errors="replace"),
            "libraries": _named_libraries(llama),
            "separate": llama.llama_model_has_encoder(self._model) and llama.llama_model_has_decoder(self._model),
            "log": self._log_lines(),
        }

    def do_close(self) -> dict[str, Any]:
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._model = self._context = self._cache = self._mapping = None
        return {}

    def do_forward(self, rows: int, wanted: int, hidden: int, images: int) -> dict[str, Any]:
        """Run the rows in shared memory, and write the logits of the `wanted` marked rows to shared memory.

        If `hidden` is not 0, all rows are wanted, and their hidden states are written, too. `images` is the kind of the
        rows: TOKENS, CAUSAL_IMAGES or WHOLE_IMAGE.

        The status is 0 on success, 1 if the cache has no room, 2 if the pass was stopped, and negative for other
        errors. After an error, the sequences are restored to their former state or to a prefix of it.
        """
        if self._flag[0]:
            return {"status": 2}
        batch = self._image_batch if images else self._batch
        batch.n_tokens = rows
        if hidden != self._gives_hidden:
            self._gives_hidden = hidden
            self._llama.llama_set_embeddings(self._context, bool(hidden))
        sequences = self._sequences[:rows]
        self._checkpoints.before(sequences, self._lengths, images=images != TOKENS)
        if images == WHOLE_IMAGE:
            self._llama.llama_set_causal_attn(self._context, False)
        status = self._run(self._context, batch)
        if images == WHOLE_IMAGE:
            self._llama.llama_set_causal_attn(self._context, True)
        if status == 0:
            if wanted:
                os.write(self._answers, NEARLY)  # The parent wakes up while this process copies the logits.
                self._copy_outputs(wanted)
            for seq in sequences if self._cache else ():
                self._lengths[seq] += 1
            self._positions.add(sequences, self._row_positions[:rows])
            self._checkpoints.after(sequences, self._lengths, images=images != TOKENS)
            return {"status": 0}
        for seq in sorted(set(sequences)):
            # llama.cpp has removed the positions of the failed rows, which earlier rows of an image share.
            first = self._row_positions[sequences.index(seq)]
            self._lengths[seq] = self._keep(seq, min(self._lengths[seq], self._positions.rows_before(seq, first)))
        return {"status": status, "error": "" if status >= 0 else self._last_error()}

    def do_truncate(self, seq: int, n: int) -> dict[str, Any]:
        self._lengths[seq] = self._keep(seq, min(n, self._lengths[seq]))
        return {"kept": self._lengths[seq]}

    def do_copy(self, src: int, dst: int, n: int) -> dict[str, Any]:
        self._keep(dst, 0)
        n = self._positions.border(src, min(n, self._lengths[src]))
        if n:
            self._llama.llama_memory_seq_cp(self._cache, src, dst, 0, self._positions.end(src, n))
            self._positions.copy(src, dst, n)
            self._checkpoints.share(src, dst, n)
        self._lengths[dst] = self._keep(dst, n)
        return {"kept": self._lengths[dst]}

    def do_saved_size(self, seq: int) -> dict[str, Any]:
        return {"n_bytes": self._saved_size(seq)}

    def do_save(self, seq: int, memory: str, n_bytes: int) -> dict[str, Any]:
        """Write a sequence to memory. The answer contains the number of bytes, or 0 if the memory is too small."""
        data = self._transferred(memory, n_bytes)
        return {"n_bytes": self._llama.llama_state_seq_get_data_ext(self._context, data, n_bytes, seq, _ALL)}

    def do_load(self, seq: int, memory: str, n_bytes: int, n: int) -> dict[str, Any]:
        """Replace a sequence with a saved sequence of n tokens, or clear the sequence if llama.cpp rejects the data.

        Malicious data can crash the process. llama.cpp cannot remove cells with negative positions, which would become
        part of later sequences, so the process aborts if any cells are left.
        """
        llama = self._llama
        self._lengths[seq] = self._keep(seq, 0)
        empty_size = self._saved_size(seq)
        data = self._transferred(memory, n_bytes)
        read = llama.llama_state_seq_set_data_ext(self._context, data, n_bytes, seq, _ALL)
        if read not in (0, self._saved_size(seq)):
            _give_up("some cells of a loaded sequence cannot be found again")
        self._positions.load(seq, data, n)
        if read == n_bytes and self._reaches_back(seq, n) and llama.llama_memory_seq_pos_min(self._cache, seq) >= 0:
            self._lengths[seq] = n
        else:
            llama.llama_memory_seq_rm(self._cache, seq, -1, -1)
            self._positions.truncate(seq, 0)
            if self._saved_size(seq) != empty_size or llama.llama_memory_seq_pos_max(self._cache, seq) != -1:
                _give_up("a loaded sequence cannot be removed")
        return {"kept": self._lengths[seq]}

    def _saved_size(self, seq: int) -> int:
        """Return the size of a saved sequence in bytes, or 0 if llama.cpp cannot save it."""
        size: int = self._llama.llama_state_seq_get_size_ext(self._context, seq, _ALL)
        return size

    def do_special_tokens(self) -> dict[str, Any]:
        """Return the special tokens, each as [id, text, attributes, whether it ends generation], and tokens with roles.

        "fill" contains the tokens of `FillTokens` after the BOS. Missing tokens are reported as -1."""
        llama, vocabulary = self._llama, self._llama.llama_model_get_vocab(self._model)
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN | llama.LLAMA_TOKEN_ATTR_USER_DEFINED
        found = []
        for token in range(llama.llama_vocab_n_tokens(vocabulary)):
            attributes = llama.llama_vocab_get_attr(vocabulary, token)
            ends = llama.llama_vocab_is_eog(vocabulary, token)
            if attributes & special or ends:
                text = llama.llama_vocab_get_text(vocabulary, token).decode("latin-1")
                found.append([token, text, attributes, ends])
        return {
            "special": found,
            "bos": llama.llama_vocab_bos(vocabulary),
            "eos": llama.llama_vocab_eos(vocabulary),
            "add_bos": llama.llama_vocab_get_add_bos(vocabulary),
            "fill": [
                getattr(llama, f"llama_vocab_fim_{role}")(vocabulary) for role in ("pre", "suf", "mid", "rep", "sep")
            ],
        }

    def do_tokenize(self, text: str, add_special: bool, parse_special: bool) -> dict[str, Any]:
        data = text.encode()
        if len(data) <= _SHORT_TEXT:
            return {"tokens": self._tokens(data, add_special, parse_special)}
        stack = min(USUAL_STACK + len(data) * _STACK_OF_A_BYTE, _MOST_STACK)
        return {"tokens": on_stack(stack, lambda: self._tokens(data, add_special, parse_special))}

    def _tokens(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(data) + 8
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        while True:
            tokens = (ctypes.c_int32 * room)()
            n = self._llama.llama_tokenize(vocabulary, data, len(data), tokens, room, add_special, parse_special)
            if n >= 0:
                return tokens[:n]
            room = -n

    def do_pieces(self, first: int, end: int) -> dict[str, Any]:
        """Return the bytes of tokens, decoded as Latin-1 so that they can be sent as JSON."""
        return {"pieces": [self._piece(token).decode("latin-1") for token in range(first, end)]}

    def _piece(self, token: int) -> bytes:
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        room = 64
        while True:
            piece = ctypes.create_string_buffer(room)
            n = self._llama.llama_token_to_piece(vocabulary, token, piece, room, 0, False)
            if n >= 0:
                return piece.raw[:n]
            room = -n

    def do_open_adapters(self, paths: Sequence[str]) -> dict[str, Any]:
        """Load adapters for the open model, or return, as `failed`, the index of an adapter that cannot be loaded.

        llama.cpp frees the adapters together with their model.
        """
        self._adapters: list[Any] = []
        for index, path in enumerate(paths):
            adapter = self._llama.llama_adapter_lora_init(self._model, os.fsencode(path))
            if not adapter:
                return {"failed": index}
            self._adapters.append(adapter)
        return {}

    def do_use_adapters(self, scales: Sequence[float]) -> dict[str, Any]:
        """Apply adapters with these scales from now on. An adapter with the scale 0 is not applied."""
        used = [(adapter, scale) for adapter, scale in zip(self._adapters, scales, strict=True) if scale]
        pointers = (self._llama.llama_adapter_lora_p_ctypes * len(used))(*[adapter for adapter, _ in used])
        factors = (ctypes.c_float * len(used))(*[scale for _, scale in used])
        return {"status": self._llama.llama_set_adapters_lora(self._context, pointers, len(used), factors)}

    def _load(self, path: str, gpu_layers: int, tensor_split: Sequence[float], split_mode: str, main_gpu: int) -> bool:
        llama = self._llama
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        parameters.split_mode = getattr(llama, f"LLAMA_SPLIT_MODE_{split_mode.upper()}")
        parameters.main_gpu = main_gpu
        if tensor_split:  # llama.cpp reads a number for every possible device.
            split = (ctypes.c_float * llama.llama_max_devices())(*tensor_split)
            parameters.tensor_split = split
        if gpu_layers == 0:
            self._without_devices(parameters)
        reported = -1

        def on_progress(fraction: float, data: Any) -> bool:
            nonlocal reported
            step = int(fraction * _PROGRESS_STEPS)
            if self._has_servers and reported < 0:  # The first report is made when all connections are open.
                keep_connections_alive()
            if step > reported:
                reported = step
                os.write(self._answers, answer_line(self.number, {"progress": fraction}))
            return not self._flag[0]

        callback = llama.llama_progress_callback(on_progress)
        parameters.progress_callback = callback
        self._model = llama.llama_model_load_from_file(os.fsencode(path), parameters)
        return bool(self._model)

    def _make_context(self, gpu_layers: int, cache_tokens: int, threads: int, kv_type: str, batch_rows: int) -> bool:
        llama, layout = self._llama, self._layout
        parameters = llama.llama_context_default_params()
        # llama.cpp also rounds up the context size, but only after asserting that the largest batch fits.
        parameters.n_ctx = -(-cache_tokens // CONTEXT_STEP) * CONTEXT_STEP
        parameters.n_batch = layout.rows
        parameters.n_ubatch = layout.rows if layout.encodes else min(batch_rows, cache_tokens)
        parameters.n_seq_max = layout.max_sequences
        parameters.n_outputs_max = max(layout.most_wanted, layout.max_sequences)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.offload_kqv = parameters.op_offload = gpu_layers != 0
        # Hidden states are requested for each row, but llama.cpp applies a classification head only to pooled states.
        parameters.pooling_type = llama.LLAMA_POOLING_TYPE_RANK if self._ranks else llama.LLAMA_POOLING_TYPE_NONE
        parameters.kv_unified = True  # With a separate cache per sequence, llama.cpp aborts on a partial copy.
        parameters.swa_full = False
        parameters.no_perf = True
        types = parse_kv_type(kv_type)
        parameters.type_k, parameters.type_v = (getattr(llama, f"GGML_TYPE_{kind.name.upper()}") for kind in types)
        if types.values.has_scales:
            # Only flash attention supports quantized values, and llama.cpp's automatic choice may disable it.
            parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # llama.cpp calls the abort callback at every node of the graph. A Python callback would take the GIL each time,
        # which costs 1 to 2 ms per token. Instead, the callback is the C function strlen. The abort flag is two bytes
        # of shared memory, which form a string of length 0 or 1.
        libc = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.cdll.msvcrt
        strlen = ctypes.cast(libc.strlen, ctypes.c_void_p).value
        parameters.abort_callback = llama.ggml_abort_callback(strlen)
        parameters.abort_callback_data = _address(self._flag)
        self._context = llama.llama_init_from_model(self._model, parameters)
        if self._context:
            self._gives_hidden = 0
            self._run = llama.llama_encode if llama.llama_model_has_encoder(self._model) else llama.llama_decode
            self._cache = llama.llama_get_memory(self._context)
        return bool(self._context)

    def _make_batch(self, rows: int) -> None:
        """Create a llama_batch whose arrays are in shared memory."""
        llama, layout = self._llama, self._layout
        base = _address(self._mapping)
        batch = llama.llama_batch()
        self._sequences = (ctypes.c_int32 * rows).from_address(base + layout.sequences)
        self._row_positions = (ctypes.c_int32 * rows).from_address(base + layout.positions)
        self._wanted = (ctypes.c_int8 * rows).from_address(base + layout.wanted)
        self._ones = (ctypes.c_int32 * rows)(*[1] * rows)
        starts = range(base + layout.sequences, base + layout.sequences + 4 * rows, 4)
        self._sequence_starts = (ctypes.c_void_p * rows)(*starts)
        integers = ctypes.POINTER(ctypes.c_int32)
        batch.token = ctypes.cast(base + layout.tokens, integers)
        batch.pos = ctypes.cast(base + layout.positions, integers)
        batch.n_seq_id = ctypes.cast(self._ones, integers)
        batch.seq_id = ctypes.cast(self._sequence_starts, ctypes.POINTER(integers))
        batch.logits = ctypes.cast(base + layout.wanted, ctypes.POINTER(ctypes.c_int8))
        self._batch = batch
        self._image_batch = llama.llama_batch.from_buffer_copy(batch)
        self._image_batch.token = integers()
        self._image_batch.embd = ctypes.cast(base + layout.embeds, ctypes.POINTER(ctypes.c_float))

    def _copy_outputs(self, wanted: int) -> None:
        llama, layout, base = self._llama, self._layout, _address(self._mapping)
        if not layout.encodes:
            logits = llama.llama_get_logits(self._context)
            ctypes.memmove(base + layout.logits, logits, 4 * wanted * layout.vocabulary_size)
        if not self._gives_hidden:
            return
        n_bytes = 4 * layout.hidden_size
        if not self._ranks:
            ctypes.memmove(base + layout.hidden, llama.llama_get_embeddings(self._context), wanted * n_bytes)
            return
        for row in (row for row in range(wanted) if self._wanted[row]):
            scores = llama.llama_get_embeddings_seq(self._context, self._sequences[row])
            ctypes.memmove(base + layout.hidden + row * n_bytes, scores, n_bytes)

    def _keep(self, seq: int, n: int) -> int:
        """Truncate a sequence to n tokens or fewer, and return the number of tokens that are left.

        In models with M-RoPE, images are removed as a whole. A recurrent state cannot be rewound, so the last
        checkpoint is restored. Without a checkpoint, or if a sliding window has discarded tokens that are needed again,
        nothing is left. Most encoders have no cache at all, so their sequences are always empty.
        """
        if not self._cache:
            return 0
        n = self._positions.border(seq, n)
        if not self._removed(seq, n):
            n = self._checkpoints.restore(seq, n)
            if not self._removed(seq, n):
                n = 0
                self._llama.llama_memory_seq_rm(self._cache, seq, -1, -1)
        self._positions.truncate(seq, n)
        self._checkpoints.cut(seq, n)
        return n

    def _removed(self, seq: int, n: int) -> bool:
        """Remove all but the first n tokens of a sequence. Returns False if n is 0, or if that is impossible."""
        end = self._positions.end(seq, n)
        return n > 0 and self._llama.llama_memory_seq_rm(self._cache, seq, end, -1) and self._reaches_back(seq, n)

    def _reaches_back(self, seq: int, n: int) -> bool:
        end = self._positions.end(seq, n)
        if self._llama.llama_memory_seq_pos_max(self._cache, seq) != end - 1:
            return False
        window = self._llama.llama_model_n_swa(self._model)  # the window includes the current token
        return not window or self._llama.llama_memory_seq_pos_min(self._cache, seq) <= max(0, end - window + 1)


def declarations() -> Any:
    """Import the module with llama-cpp-python's ctypes declarations, without running the package's `__init__`.

    `__init__` imports Jinja2, NumPy and more, which takes 0.13 to 0.24 s. The module alone takes 0.035 s. Raises
    WrongLibrary if LLAMA_CPP_LIB_PATH names libraries that do not match the declarations.
    """
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("llama_cpp is not installed")
    package = types.ModuleType("llama_cpp")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["llama_cpp"] = package
    folder = os.environ.get(LIBRARY_FOLDER)
    if folder is None:
        return importlib.import_module("llama_cpp.llama_cpp")
    from llmrun.backends.llama.named_libraries import checked_declarations

    return checked_declarations(folder)


def _named_libraries(llama: Any) -> str:
    """Return the folder and the version of the libraries that LLAMA_CPP_LIB_PATH names, or "" if it is not set."""
    if (folder := os.environ.get(LIBRARY_FOLDER)) is None:
        return ""
    from llmrun.backends.llama.named_libraries import build_words

    return f"{folder}: {build_words(llama._lib)}"


def _give_up(why: str) -> None:
    os.write(2, f"llama.cpp: error: {why}\n".encode())
    os.abort()


def _address(mapping: mmap.mmap | None) -> int:
    if mapping is None:
        raise RuntimeError("no shared memory yet")
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


if __name__ == "__main__":
    main(LlamaWorker)
