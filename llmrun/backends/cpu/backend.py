"""Our own engine on the CPU. The engine turns a GGUF file into a plan, packed weights, a paged KV cache and threads."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from msgspec import Struct

from llmrun.backends.base import check_batch, identity_of, key_of
from llmrun.backends.cpu.cache_size import cache_size, kv_type_of, rows_of_step
from llmrun.backends.cpu.lower import kv_shapes, lower, state_shapes
from llmrun.backends.cpu.paged_kv import PagedKV, blocks_in, convolution_windows
from llmrun.backends.cpu.prefetching import Prefetching
from llmrun.backends.cpu.recurrent_states import RecurrentStates, checkpoint_shapes, n_checkpoints
from llmrun.backends.cpu.steps import (
    Rotations,
    StepImages,
    WantedRows,
    check_whole,
    rows_after_images,
    runs_of,
    steps_of,
)
from llmrun.backends.cpu.team import TEAM_KERNELS, SummingTeam, Team, WatchedTeam, named_digests
from llmrun.backends.cpu.weights import filling, packing_kernels, reserve
from llmrun.backends.describe import describe
from llmrun.backends.lora_files import described, opened_adapters
from llmrun.base.amounts import counted
from llmrun.base.compiled.host import host_target, load_kernels
from llmrun.base.compiled.kernel import KernelName
from llmrun.base.machine.cpu_count import default_threads, most_threads
from llmrun.base.types import HIDDEN, IMAGE_ROW, LOGITS, Batch, LoadTimes, Outputs
from llmrun.formats.layouts.arena import allocate
from llmrun.formats.layouts.records import NUMERICS
from llmrun.formats.layouts.tokens import SAMPLING_KERNEL
from llmrun.model.archs.parts.architecture import architecture_of
from llmrun.model.tokenizers.kinds import load_tokenizer, tokenizer_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions, Progress, Vision
    from llmrun.backends.cpu.draft_head import CpuDraftHead
    from llmrun.backends.cpu.early_memory import EarlyMemory
    from llmrun.backends.cpu.timed_team import TimedTeam
    from llmrun.backends.cpu.vision import CpuVision
    from llmrun.backends.cpu.weights import PackedMatrix
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.plan import Plan
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

_Team = TypeVar("_Team", bound=Team)


class CpuBackend:
    """The Backend that runs llmrun's own kernels."""

    def __init__(
        self,
        file: GGUFFile,
        options: OpenOptions,
        early: EarlyMemory | None = None,
        vision: Vision | None = None,
    ) -> None:
        """Open a model. Raises ModelFileError, UnsupportedModel, DoesNotFit, and UsageError for wrong adapters.

        early   memory that may be used for the weights
        vision  an encoder that is used instead of the engine's own, for tests
        """
        self.vision = vision
        self._encoder: CpuVision | None = None  # the encoder that is loaded along with the model
        try:
            with opened_adapters(options.adapters, file) as adapters:
                self._open(file, options, adapters, early)
        except BaseException:
            if self._encoder is not None:
                self._encoder.close()
            raise

    def _open(
        self, file: GGUFFile, options: OpenOptions, adapters: Sequence[AdapterFile], early: EarlyMemory | None
    ) -> None:
        began = time.perf_counter()
        architecture = architecture_of(file)
        config = architecture.read_config(file)
        vocabulary_kernels = tokenizer_kernels(file)  # checked before any slow work, because the file may be rejected
        base = architecture.plan(file, config)
        n_threads = options.threads or default_threads()
        if options.mmproj:
            self._encoder = self.vision = _encoder_of(file, options, base, n_threads)
        projector = None if self.vision is None else self.vision.projector
        self.plan = base if projector is not None else base.without_images()
        if adapters:
            from llmrun.backends.cpu.adapters import adapted

            self.plan = adapted(self.plan, adapters)
        head = architecture.draft_plan(file, config) if options.draft_head else None
        head = head and head.without_images()
        max_sequences = options.max_sequences
        if set(self.plan.windows) <= {0} and not self.plan.states:  # otherwise, each sequence needs its own memory
            max_sequences += options.cached_prefixes
        if early is not None:  # the memory is no longer free, but the weights will use it
            options = replace(options, reserved_memory=options.reserved_memory - early.stop())
        encoder = None if self._encoder is None else self._encoder.memory
        context_size, n_blocks = cache_size(
            file, self.plan, head, options, config.train_context, n_threads, projector, encoder
        )
        kv_type = kv_type_of(file, options)
        memory = _Memory.of(self.plan, n_blocks, max_sequences, kv_type)
        ropes = [rope.in_context(context_size) for rope in self.plan.ropes]
        self._rotations = Rotations(ropes)
        self._max_rows = rows_of_step(self.plan, config.train_context, context_size, projector)
        self._most_text_rows = rows_of_step(self.plan, config.train_context, context_size)
        packed = reserve(self.plan.matrices if head is None else self.plan.matrices_with(head), early)
        self._lower(head, packed, memory, max_sequences * blocks_in(context_size), kv_type, n_threads)
        lowered = time.perf_counter()
        self._load_kernels(packed, vocabulary_kernels, options.progress)
        kernels_s = time.perf_counter() - lowered
        all_packed = packed if self._encoder is None else {**packed, **self._encoder.packed}
        with filling(all_packed, n_threads) as weights:
            packing = time.perf_counter()
            self.tokenizer: Tokenizer = load_tokenizer(file)
            tokenizer_s = time.perf_counter() - packing
            options.on_tokenizer(self.tokenizer)
            weights.finish(_load_progress(options.progress))
        key = key_of(_decisive(file, base.without_images(), ropes, kv_type)) if options.saves_state else ""
        file.check_unchanged()
        if self._encoder is not None:
            self._encoder.finish()
        self._states = memory.recurrent_states(self.plan, keeps_rows=options.keeps_rows)
        convolutions = () if self.vision is None or self.plan.states else convolution_windows(self.plan)
        self.kv = PagedKV(memory.by_window(self.plan), max_sequences, context_size, self._states, key, convolutions)
        costs = weights.costs()
        weight_bytes = sum(part.layout.n_bytes for part in packed.values())
        self._team: Team = Team(self.lowered, n_threads, prefetching=Prefetching(n_threads, weight_bytes))
        self.info = describe(
            file,
            vocabulary_size=len(file.strings("tokenizer.ggml.tokens")),
            train_context=config.train_context,
            context_size=context_size,
            max_sequences=max_sequences,
            backend="cpu",
            device=f"{counted(n_threads, 'thread')}, {host_target().level.name}",
            threads=n_threads,
            kv_type=kv_type,
            kv_bytes=memory.nbytes + (0 if self.draft_head is None else self.draft_head.kv_bytes),
            batch_invariant=True,
            adapters=described(options.adapters, adapters),
            hidden_size=0 if self.plan.hidden is None else self.plan.hidden.width,
            has_logits=self.plan.logits is not None,
            load_times=LoadTimes(
                header_s=file.read_s,
                kernels_s=kernels_s,
                tokenizer_s=tokenizer_s,
                packing_s=weights.seconds,
                backend_s=time.perf_counter() - began,
                packed_bytes=sum(part.layout.n_bytes for part in all_packed.values()),
                page_faults=None if costs is None else costs.page_faults,
                system_s=None if costs is None else costs.system_s,
            ),
        )
        if self.draft_head is not None:
            self.draft_head.start(self.info)

    def _lower(
        self,
        head: Plan | None,
        packed: Mapping[str, PackedMatrix],
        memory: _Memory,
        full_blocks: int,
        kv_type: str,
        n_threads: int,
    ) -> None:
        """Lower the plan of the model and the plan of the draft head.

        full_blocks  the number of cache blocks for a whole context per sequence
        """
        self.lowered = lower(
            self.plan,
            packed,
            memory.kv,
            memory.states,
            kv_type=kv_type,
            max_rows=self._max_rows,
            n_threads=n_threads,
        )
        self.draft_head: CpuDraftHead | None = None
        if head is not None:
            from llmrun.backends.cpu.draft_head import CpuDraftHead

            # The head's cache has as many blocks as the cache of layers without a window. All sequences share these
            # blocks, which may take less memory than a whole context for each sequence would.
            kv = memory.by_window(self.plan).get(0)
            blocks = full_blocks if kv is None else kv[0].shape[1]
            self.draft_head = CpuDraftHead(head, packed, blocks, kv_type=kv_type, n_threads=n_threads)

    def _load_kernels(
        self,
        packed: Mapping[str, PackedMatrix],
        vocabulary_kernels: Sequence[KernelName],
        progress: Progress | None,
    ) -> None:
        """Load all kernels in one call, so that the first run compiles them in parallel.

        The sampling kernel is loaded first, because it takes long to compile. As the last kernel, it would keep one
        core busy after all other cores have finished.
        """
        lowered = [self.lowered] if self.draft_head is None else [self.lowered, self.draft_head.lowered]
        kernels = [KernelName.of(*SAMPLING_KERNEL), *(kernel for part in lowered for kernel in part.kernels)]
        kernels += [*packing_kernels([part.matrix for part in packed.values()]), *TEAM_KERNELS, *vocabulary_kernels]
        if self._encoder is not None:
            kernels += self._encoder.kernels
            lowered.append(self._encoder.lowered)
        load_kernels(kernels, _compile_progress(progress))
        for part in lowered:
            part.link()

    def forward(self, batch: Batch) -> Outputs:
        """Run a forward pass in steps, in order, as specified by Backend.forward."""
        check_batch(batch, self.info, self.kv.lengths, 0 if self.vision is None else self.vision.projector.row_width)
        sequences = batch.seq.tolist()
        if not self.plan.is_causal:
            check_whole(sequences, batch.pos.tolist())
        before = {seq: self.kv.lengths[seq] for seq in sequences}
        logits = np.empty((np.count_nonzero(batch.want & LOGITS), self.lowered.logits_width), np.float32)
        hidden = np.empty((np.count_nonzero(batch.want & HIDDEN), self.info.hidden_size), np.float32)
        try:
            steps = self._steps(batch, sequences)
            if len(steps) > 1:
                self.kv.require(Counter(sequences))
            scored = shown = 0
            for rows in steps:
                self.kv.extend(Counter(sequences[rows]))
                wanted = WantedRows.of(batch.want[rows], self.plan.hidden)
                self._run(batch, rows, wanted, logits[scored : scored + wanted.scored])
                if len(wanted.hidden):
                    self._take_hidden(wanted.hidden, hidden[shown:])
                scored, shown = scored + wanted.scored, shown + len(wanted.hidden)
        except BaseException:
            # After several steps, the window at the former length may be incomplete, and `truncate` then keeps nothing.
            # A recurrent state may be past the former length, and `truncate` then restores a checkpoint.
            for seq, length in before.items():
                if self.kv.lengths[seq] > length:  # truncating nothing would indicate a new request
                    self.kv.truncate(seq, length)
            raise
        finally:
            self._team.clear_cancel()
        return Outputs(logits[:, : self.info.vocabulary_size], hidden)

    def _steps(self, batch: Batch, sequences: list[int]) -> list[slice]:
        """Divide the rows of a batch into steps. Raises ValueError if a step would need more memory than there is."""
        is_causal = self.plan.is_causal
        beginnings = [] if self.kv.states is None else rows_after_images(batch)
        most = self._most_text_rows  # larger steps of text would delay other requests
        steps = list(steps_of(sequences, most, whole=not is_causal, ahead=batch.ahead, beginnings=beginnings))
        if max(step.stop - step.start for step in steps) > self._max_rows:
            raise ValueError(f"an image has more than {self._max_rows} rows that attend to each other")
        return steps

    def _run(self, batch: Batch, rows: slice, wanted: WantedRows, logits: NDArray[np.float32]) -> None:
        positions = np.ascontiguousarray(batch.pos[rows], np.int32)
        images = None if batch.embeds is None else StepImages.of(batch, rows)
        tokens = batch.tokens[rows]
        inputs = (
            np.ascontiguousarray(tokens if images is None else np.maximum(tokens, 0), np.int32),
            positions,
            self.kv.table_addresses(batch.seq[rows]),
            wanted.rows,
            self._rotations.of(positions if batch.rope_pos is None else batch.rope_pos[rows]),
            logits,
        )
        scales = _contiguous_scales(batch, rows)
        if self.kv.states is None:
            self._team.run(*inputs, scales=scales, images=images)
            return
        in_image = None if images is None else (tokens == IMAGE_ROW).tolist()
        scored = (batch.want[rows] & LOGITS).tolist()
        runs = runs_of(batch.seq[rows].tolist(), positions.tolist(), scored, in_image)
        if self._states is None:
            assert self.kv.convolutions is not None
            self.kv.convolutions.begin(runs)
            self._team.run(*inputs, scales=scales, images=images)
            self.kv.convolutions.finish(runs)
            return
        words = self._states.begin(runs)
        try:
            self._team.run(*inputs, words, scales, images)
            self._states.finish()
        except BaseException:  # a signal handler may raise even after the step, or inside `finish`
            self._states.lose()
            raise

    def _take_hidden(self, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Copy hidden states that the last step left in memory to the first rows of `out`."""
        assert self.lowered.hidden is not None
        np.divide(self.lowered.hidden[places], np.float32(self.plan.hidden_scale), out=out[: len(places)])

    @contextmanager
    def timed(self) -> Iterator[TimedTeam]:
        """Run the steps of the `with` block on a team that times every op (timed_team.py).

        Other threads must not run steps within the block.
        """
        from llmrun.backends.cpu.timed_team import TimedTeam

        with self._replaced(TimedTeam(self.lowered, self.info.threads)) as timed:
            yield timed

    @contextmanager
    def summing(self, *, with_output: bool = False) -> Iterator[SummingTeam]:
        """Run the steps of the `with` block on a team that sums the squares of the inputs of all matrices."""
        with self._replaced(SummingTeam(self.lowered, self.info.threads, self.plan, with_output=with_output)) as team:
            yield team

    def op_digests(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
        """Run the first tokens of a sequence in one step, and return the name and the output's digest of each op.

        The last digest covers the logits of all tokens. Sequence 0 must be empty, and is empty afterwards.
        """
        n = len(tokens)
        rows = np.arange(n, dtype=np.int32)
        with self._replaced(WatchedTeam(self.lowered, self.info.threads)) as watched:
            try:
                self.forward(
                    Batch(np.array(tokens, np.int32), np.zeros(n, np.int32), rows, np.full(n, LOGITS, np.uint8))
                )
            finally:
                self.kv.free(0)
            return named_digests(self.plan, watched.digests)

    @contextmanager
    def _replaced(self, team: _Team) -> Iterator[_Team]:
        """Run the steps of the `with` block on another team."""
        normal = self._team
        self._team = team
        try:
            yield team
        finally:
            self._team = normal
            team.close()

    def cancel(self) -> None:
        self._team.cancel()

    def close(self) -> None:
        if self.draft_head is not None:
            self.draft_head.close()
        self._team.close()
        if self.vision is not None:
            self.vision.close()


class _Memory(Struct, frozen=True):
    """The memory of the KV cache and of the recurrent states, for each group of layers."""

    kv: list[NDArray[np.uint8]]
    states: list[NDArray[np.uint8]]
    checkpoints: list[NDArray[np.uint8]]

    @classmethod
    def of(cls, plan: Plan, n_blocks: Sequence[int], max_sequences: int, kv_type: str) -> Self:
        checkpoints = checkpoint_shapes(plan.states, n_checkpoints(plan.states, max_sequences))
        return cls(
            _allocated(kv_shapes(plan, n_blocks, kv_type), "KV cache"),
            _allocated(state_shapes(plan, max_sequences), "recurrent states"),
            _allocated(checkpoints, "checkpoints of recurrent states"),
        )

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in [*self.kv, *self.states, *self.checkpoints])

    def by_window(self, plan: Plan) -> dict[int, list[NDArray[np.uint8]]]:
        """Return the memory of the KV cache by window."""
        return {
            window: [part for group, part in zip(plan.groups, self.kv, strict=True) if group.shape.window == window]
            for window in plan.windows
        }

    def recurrent_states(self, plan: Plan, *, keeps_rows: bool) -> RecurrentStates | None:
        """Return the recurrent states, or None if the model has none."""
        if not self.states:
            return None
        return RecurrentStates(plan.states, self.states, self.checkpoints, keeps_rows=keeps_rows)


def _encoder_of(file: GGUFFile, options: OpenOptions, plan: Plan, n_threads: int) -> CpuVision:
    """Return the encoder of the projector that the options name. Its weights are not loaded yet."""
    from llmrun.backends.cpu.vision import CpuVision
    from llmrun.backends.encoders import check_plan, opened_projector

    projector = opened_projector(options, file)
    assert projector is not None
    check_plan(plan, projector, file)
    return CpuVision(projector, n_threads)


def _allocated(shapes: Iterable[tuple[int, ...]], name: str) -> list[NDArray[np.uint8]]:
    return [allocate(math.prod(shape), name).reshape(shape) for shape in shapes]


def _contiguous_scales(batch: Batch, rows: slice) -> NDArray[np.float32] | None:
    """Return the scales of a step's rows, or None if no row uses an adapter."""
    if batch.scales is None or not batch.scales[rows].any():
        return None
    return np.ascontiguousarray(batch.scales[rows], np.float32)


def _decisive(file: GGUFFile, plan: Plan, ropes: Sequence[Rope], kv_type: str) -> dict[str, Any]:
    """Return everything that determines the contents of the KV cache for given tokens."""
    groups = [f"{group.layers} {group.shape}" for group in plan.groups]
    states = [f"{group.layers} {group.shape}" for group in plan.states]
    turns = [f"{rope.frequencies.tobytes().hex()} {rope.magnitude} {rope.growth}" for rope in ropes]
    return {
        "backend": "cpu",
        "numerics": NUMERICS,
        "model": identity_of(file),
        "kv_type": kv_type,
        "plan": [[type(op).__name__ for op in plan.ops], groups, states, turns],
    }


def _compile_progress(progress: Progress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    report, began = progress, time.perf_counter()

    def compiled(done: int, total: int) -> None:
        expected = _COMPILE_S * _EXPECTED / min(total, most_threads())
        seconds = (expected + time.perf_counter() - began) / (_EXPECTED + done) * (total - done)
        left = f", about {math.ceil(seconds / 5) * 5} s left" if done < total else ""
        report(f"compiling kernels {done}/{total}, only once{left}", done / total)

    return compiled


# The time left is predicted as if, before the first kernel, this number of kernels had taken this time per processor.
# Otherwise, predictions would be far too long at first, because large kernels are compiled first.
_COMPILE_S = 1.0
_EXPECTED = 4


def _load_progress(progress: Progress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    report = progress
    return lambda done, total: report("loading weights", done / total)
