"""The llama.cpp backend, for GPUs and for models that our own engine does not support.

llama.cpp runs in a child process (worker.py), so that a bad file or a faulty driver cannot crash the session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.backends.base import AUTO, check_batch, identity_of, key_of
from llmrun.backends.describe import describe
from llmrun.backends.llama.kv_cache import CELL, RECURRENT_CELL, LlamaCache
from llmrun.backends.llama.log import offloaded, placement_words, refusal
from llmrun.backends.llama.lora import Scales, check_applied, in_order, passes_of
from llmrun.backends.llama.messages import CONTEXT_STEP, MROPE_CELL, PLANES, TOKENS, WHOLE_IMAGE, Layout
from llmrun.backends.llama.placement import (
    cache_bytes,
    decide_placement,
    kv_type_of,
    rows_at_once,
    split_of,
    tokens_with,
)
from llmrun.backends.llama.probe import installed_version
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.tokenizer import LlamaTokenizer
from llmrun.backends.llama.vision import image_groups
from llmrun.backends.lora_files import described, opened_adapters
from llmrun.backends.sizing import encoder_gpu_bytes
from llmrun.base.errors import (
    BackendCrashed,
    Cancelled,
    KVFull,
    LlmrunError,
    ModelFileError,
    UnsupportedModel,
    UsageError,
    shown,
)
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.types import HIDDEN, IMAGE_ROW, LOGITS, Batch, Outputs
from llmrun.formats.gguf.source import FileSource
from llmrun.formats.layouts.arena import round_up
from llmrun.model.archs.parts.encoders import is_encoder, labels_of
from llmrun.model.tokenizers.kinds import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions, Progress
    from llmrun.backends.llama.vision import LlamaVision
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

MAX_ROWS = 1024  # rows per request to the child process; llama.cpp splits these rows further
_SHARES = ("qwen3", "qwen3vl")  # architectures whose rerankers return probabilities in llama.cpp, instead of logits


class LlamaBackend:
    """A Backend that runs a model with llama.cpp."""

    draft_head = None
    vision: LlamaVision | None = None

    def __init__(
        self,
        file: GGUFFile,
        options: OpenOptions,
        *,
        process: LlamaProcess | None = None,
    ) -> None:
        """Open a model from a file that the GGUF reader has validated.

        process  the child process to use, or None to start one that is closed with this backend
        Raises ModelFileError, UnsupportedModel, DoesNotFit and BackendCrashed. Raises NoRoomOnGpu if the number of GPU
        layers is "auto" and no layer fits. Raises UsageError and NetworkError for unusable RPC servers.
        """
        self._path = shown(str(file.path), 300)
        with contextlib.ExitStack() as opened:
            # If another program writes to the file that llama.cpp has mapped, the weights change. If another program
            # truncates the file, the process is killed when reading past the end.
            self._mapped = FileSource(file.path)
            opened.callback(self._mapped.close)
            if options.mmproj:
                from llmrun.backends.encoders import opened_projector
                from llmrun.backends.llama.vision import LlamaVision

                projector = opened_projector(options, file)
                assert projector is not None
                self.vision = LlamaVision(file.path, projector, options.threads or default_threads())
                opened.callback(self.vision.close)
            self._process = process or LlamaProcess()
            if process is None:
                opened.callback(self._process.close)
            try:
                with opened_adapters(options.adapters, file) as adapters:
                    self._open(file, options, adapters)
            except (BackendCrashed, ModelFileError):
                self._mapped.check_unchanged()
                file.check_in_place()
                raise
            file.check_in_place()  # If the file was replaced, llama.cpp has opened a file that we did not validate.
            self._opened = opened.pop_all()

    def _open(self, file: GGUFFile, options: OpenOptions, adapters: Sequence[AdapterFile]) -> None:
        check_applied(adapters, file)
        projector = self.vision.projector if self.vision else None
        architecture = file.string("general.architecture")
        threads = options.threads or default_threads()
        train_context = file.integer(f"{architecture}.context_length", minimum=1)
        encodes, labels = is_encoder(file), labels_of(file)
        if encodes and (options.context_size or 0) > train_context:
            raise UsageError(
                f"the model has only {train_context:,} positions, fewer than a context of {options.context_size:,}"
            )
        # llama.cpp fills its whole cache with zeros, so all sequences of a shared cache use the memory of one context.
        shared = encodes or options.kv_tokens == AUTO
        asked = replace(options, max_sequences=1, kv_tokens=None) if shared else options
        context_size, gpu_layers, encodes_on_gpu = decide_placement(
            asked, file, adapters, train_context, lambda: self._devices(options), projector
        )
        if self.vision:  # The projector is loaded at the same time as the weights.
            self.vision.load(encoder_gpu_bytes(self.vision.projector) if encodes_on_gpu else None)
        vocabulary_size, kv_type = len(file.strings("tokenizer.ggml.tokens")), kv_type_of(options)
        hidden_size = labels or _hidden_size(file)
        batch_rows = rows_at_once(projector)
        rows = round_up(context_size, CONTEXT_STEP) if encodes else max(MAX_ROWS, batch_rows)
        row_width = projector.row_width if projector else 0
        self._gives_shares = labels > 0 and architecture in _SHARES
        self._layout = Layout(rows, vocabulary_size, options.max_sequences, hidden_size, encodes, row_width)
        loading = f"loading {self._path}"
        memory = self._process.memory.map(self._layout.n_bytes)
        request = self._process.tell(
            "open",
            path=str(file.path.absolute()),
            gpu_layers=gpu_layers,
            cache_tokens=tokens_with(asked, context_size),
            max_sequences=options.max_sequences,
            threads=threads,
            kv_type=kv_type,
            rows=rows,
            vocabulary_size=vocabulary_size,
            hidden_size=hidden_size,
            tensor_split=split_of(options),
            split_mode=options.split_mode,
            main_gpu=options.main_gpu or 0,
            encodes=encodes,
            ranks=labels > 0,
            row_width=row_width,
            batch_rows=batch_rows,
        )
        own = _own_tokenizer(file)  # Reading the tokenizer overlaps with loading the weights.
        if own is not None:
            options.on_tokenizer(own)
        answer = self._process.answer(request, loading, _load_progress(options.progress))
        if "failed" in answer:
            raise refusal(self._path, answer["failed"], answer["log"])
        if answer["separate"] or not (answer["remembers"] or encodes):
            why = "has an encoder and a decoder" if answer["separate"] else "has no KV cache in llama.cpp"
            raise UnsupportedModel(f"model not supported: {self._path}: {shown(architecture)} {why}")
        self._scales: Scales = (0.0,) * len(adapters)  # the scales that llama.cpp currently uses
        self._open_adapters(adapters)
        self._mrope: bool = answer["mrope"]
        if self.vision:
            from llmrun.backends.encoders import check_mrope

            check_mrope(self._mrope, self.vision.projector, file)
            self.vision.wait()
        self.log: Sequence[str] = answer["log"]
        self.tokenizer: Tokenizer = own or LlamaTokenizer(
            self._process, vocabulary_size, space_prefix=_adds_space_prefix(file)
        )
        self._views(memory)
        self.kv = LlamaCache(
            self._process,
            answer["cache_tokens"],
            self._lengths,
            self._path,
            context_size=context_size,
            cell_words=_cell_words(answer),
            images=self._mrope and projector is not None,
            key=key_of(_decisive(file, kv_type, answer)) if options.saves_state and not encodes else "",
        )
        self.info = describe(
            file,
            vocabulary_size=vocabulary_size,
            train_context=train_context,
            context_size=context_size,
            max_sequences=options.max_sequences,
            backend="llama",
            device=placement_words(self.log, threads),
            gpu_layers=offloaded(self.log),
            threads=threads,
            kv_type=kv_type,
            hidden_size=hidden_size,
            has_logits=not encodes,
            adapters=described(options.adapters, adapters),
            kv_bytes=cache_bytes(
                *(file, answer["cache_tokens"], kv_type),
                max_sequences=options.max_sequences,
                rows=rows_at_once(projector),
            ),
        )

    def _open_adapters(self, adapters: Sequence[AdapterFile]) -> None:
        if not adapters:
            return
        paths = [str(adapter.file.path.absolute()) for adapter in adapters]
        answer = self._process.ask("open_adapters", f"loading adapters of {self._path}", paths=paths)
        if "failed" in answer:
            raise ModelFileError(f"llama.cpp cannot load the adapter: {shown(paths[answer['failed']], 300)}")

    def _devices(self, options: OpenOptions) -> list[dict[str, Any]]:
        """Return the GPUs and the devices of RPC servers that llama.cpp will use, after connecting to the servers."""
        if not options.rpc:
            devices: list[dict[str, Any]] = self._process.ask("devices", "looking for GPUs")["devices"]
            return devices
        from llmrun.backends.llama.rpc_devices import use_servers

        return use_servers(self._process, options.rpc, anyway=options.rpc_anyway)

    def forward(self, batch: Batch) -> Outputs:
        """Run one forward pass, as specified by `Backend.forward`."""
        before = self.kv.lengths
        check_batch(batch, self.info, before, self._layout.row_width)
        if self._mrope and batch.embeds is not None and batch.rope_pos is None:
            raise ValueError("images need RoPE positions in this model")
        if len(batch.tokens) > self.kv.capacity:  # llama.cpp aborts on a batch that is larger than the cache.
            raise self._full(len(batch.tokens))
        try:
            self._mapped.check_unchanged()
            passes = list(self._passes(batch))
            parts = [self._run(batch, rows, scales, kind) for kind, scales, rows in passes]
        except BackendCrashed:
            self._mapped.check_unchanged()
            raise
        except BaseException:
            with contextlib.suppress(BackendCrashed):  # The next pass will report the crash.
                for seq in sorted(set(batch.seq.tolist())):
                    self.kv.truncate(seq, before[seq])
            raise
        finally:
            self._process.clear_stop()
        return in_order(batch, [rows for _, _, rows in passes], parts)

    def _passes(self, batch: Batch) -> Iterator[tuple[int, Scales, NDArray[np.intp]]]:
        """Yield the passes of a batch: the kind of their rows (messages.py), the adapters' scales, and the rows."""
        layout = self._layout
        for kind, group in image_groups(batch, layout.rows):
            for scales, rows in passes_of(batch, group, len(self.info.adapters), layout.rows, layout.most_wanted):
                if kind == WHOLE_IMAGE and len(rows) < len(group):
                    raise ValueError("the rows of an image need the same adapters, and few logits")
                yield kind, scales, rows

    def _run(self, batch: Batch, rows: NDArray[np.intp], scales: Scales, kind: int) -> Outputs:
        """Run some of the rows, with the same kind (messages.py) and adapters for all of them."""
        if self._process.stopping:
            raise Cancelled("generation stopped")
        if scales != self._scales:
            self._scales = ()  # the scales are unknown if the next line raises
            answer = self._process.ask("use_adapters", f"running {self._path}", scales=scales)
            self._explain(answer["status"], "adapters", len(rows))
            self._scales = scales
        want = batch.want[rows]
        hidden = bool((want & HIDDEN).any())
        # A pass that computes hidden states returns results for all rows, including unmarked rows.
        wanted = np.arange(len(want)) if hidden else np.flatnonzero(want)
        n = len(want)
        self._sequences[:n] = batch.seq[rows]
        if kind == TOKENS:
            self._tokens[:n] = batch.tokens[rows]
        else:
            self._write_images(batch, rows)
        rope = batch.rope_pos if self._mrope else None
        self._positions[:n] = batch.pos[rows] if rope is None else rope[rows, 0]
        self._wanted[:n] = want
        doing = f"running {self._path}"
        answer = self._process.ask("forward", doing, rows=n, wanted=len(wanted), hidden=int(hidden), images=kind)
        self._explain(answer["status"], answer.get("error", ""), n)
        flags, n = want[wanted], len(wanted)
        states = self._hidden[:n][flags & HIDDEN != 0]
        return Outputs(
            self._logits[:n][flags & LOGITS != 0], np.log(np.maximum(states, 1e-30)) if self._gives_shares else states
        )

    def _write_images(self, batch: Batch, rows: NDArray[np.intp]) -> None:
        """Write the embeddings of the rows, and their positions in height and width if the model uses them."""
        assert batch.embeds is not None
        n, numbers = len(rows), np.cumsum(batch.tokens == IMAGE_ROW) - 1
        self._embeds[:n] = batch.embeds[numbers[rows]]
        if self._mrope and batch.rope_pos is not None:
            planes = self._positions[: PLANES * n].reshape(PLANES, n)
            planes[:3], planes[3:] = batch.rope_pos[rows].T, 0

    def _explain(self, status: int, error: str, n: int) -> None:
        """Raise the error that corresponds to a nonzero status from llama_decode."""
        if status == 1:
            raise self._full(n)
        if status == 2:
            raise Cancelled("generation stopped")
        if status:
            raise LlmrunError(f"llama.cpp failed while running {self._path}: status {status}: {shown(error, 200)}")

    def _full(self, n: int) -> KVFull:
        return KVFull(
            f"KV cache is full: {self.info.name}: no room for {n} more tokens, the limit is {self.kv.capacity}"
        )

    def cancel(self) -> None:
        self._process.stop()

    def close(self) -> None:
        self._opened.close()

    def _views(self, memory: object) -> None:
        """Create NumPy views of the arrays in the memory that is shared with the child process."""
        layout = self._layout

        def view(dtype: type, offset: int, count: int) -> Any:
            return np.frombuffer(memory, dtype, count, offset)  # type: ignore[call-overload]

        self._tokens = view(np.int32, layout.tokens, layout.rows)
        self._sequences = view(np.int32, layout.sequences, layout.rows)
        self._positions = view(np.int32, layout.positions, layout.rows * (PLANES if layout.row_width else 1))
        self._embeds = view(np.float32, layout.embeds, layout.rows * layout.row_width)
        self._embeds = self._embeds.reshape(layout.rows, layout.row_width)
        self._wanted = view(np.int8, layout.wanted, layout.rows)
        self._lengths = view(np.int32, layout.lengths, layout.max_sequences)
        self._logits = view(np.float32, layout.logits, prod(layout.logits_shape)).reshape(layout.logits_shape)
        hidden = view(np.float32, layout.hidden, layout.most_wanted * layout.hidden_size)
        self._hidden = hidden.reshape(layout.most_wanted, layout.hidden_size)


def _own_tokenizer(file: GGUFFile) -> Tokenizer | None:
    try:
        return load_tokenizer(file)
    except UnsupportedModel:
        return None


def _adds_space_prefix(file: GGUFFile) -> bool:
    kind = file.string("tokenizer.ggml.model")
    return file.boolean("tokenizer.ggml.add_space_prefix", default=kind in ("llama", "t5"))


def _cell_words(answer: dict[str, Any]) -> int:
    if answer["recurrent"]:
        return RECURRENT_CELL
    return MROPE_CELL if answer["mrope"] else CELL


def _decisive(file: GGUFFile, kv_type: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return everything that determines the contents of the KV cache for given tokens.

    answer  the worker's answer to the request to open the model
    """
    architecture = file.string("general.architecture")
    trained = file.integer(f"{architecture}.context_length")
    original = file.integer(f"{architecture}.rope.scaling.original_context_length", trained)
    return {
        "backend": "llama",
        "version": installed_version(),
        "libraries": answer["libraries"],
        "system": answer["system"],
        "devices": placement_words(answer["log"], 1),
        "model": identity_of(file),
        "kv_type": kv_type,
        # Models with two sets of RoPE factors use the second set for all positions of a long context.
        "long_context": answer["cache_tokens"] > original,
    }


def _hidden_size(file: GGUFFile) -> int:
    """Return the number of features of a hidden state, as in llama.cpp's llama_model_n_embd_out."""
    architecture = file.string("general.architecture")
    width = file.integer(f"{architecture}.embedding_length", minimum=1)
    return file.integer(f"{architecture}.embedding_length_out", 0) or width


def _load_progress(progress: Progress | None) -> Callable[[float], None] | None:
    if progress is None:
        return None
    report = progress
    return lambda fraction: report("loading weights", fraction)
