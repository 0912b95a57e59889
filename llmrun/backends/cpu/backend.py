"""Our own engine on the CPU. It turns a GGUF file into a plan, packed weights, a paged KV cache and worker threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmrun.archs.registry import architecture_of
from llmrun.backends.batches import check_batch
from llmrun.backends.cpu.cache_size import MAX_ROWS, cache_size
from llmrun.backends.cpu.lowering.lower import kv_shapes, lower, state_shapes
from llmrun.backends.cpu.paged_kv import PagedKV
from llmrun.backends.cpu.recurrent_states import RecurrentStates, checkpoint_shapes, n_checkpoints
from llmrun.backends.cpu.rotations import Rotations
from llmrun.backends.cpu.step_runs import runs_of
from llmrun.backends.cpu.team import TEAM_KERNELS, Team
from llmrun.backends.cpu.timed_team import TimedTeam
from llmrun.backends.cpu.watched_team import WatchedTeam, named_digests
from llmrun.backends.cpu.weights.filling import filling
from llmrun.backends.cpu.weights.packed import packing_kernels, reserve
from llmrun.backends.describe import describe, threads_in_words
from llmrun.backends.engine_kernels import ENGINE_KERNELS
from llmrun.backends.saved_parts import identity_of, key_of
from llmrun.compiled.levels import host_target
from llmrun.compiled.store import load_kernels
from llmrun.layouts.arena import allocate
from llmrun.layouts.numerics import NUMERICS
from llmrun.machine.cpu_count import default_threads
from llmrun.tokenizers.registry import load_tokenizer, tokenizer_kernels
from llmrun.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions, Progress
    from llmrun.gguf.reader import GGUFFile
    from llmrun.plan.plan import Plan
    from llmrun.plan.rope import Rope
    from llmrun.tokenizers.base import Tokenizer

_Team = TypeVar("_Team", bound=Team)


class CpuBackend:
    """The Backend that runs llmrun's own kernels."""

    def __init__(self, file: GGUFFile, options: OpenOptions) -> None:
        """Open a model. Raises ModelFileError, UnsupportedModel, DoesNotFit."""
        architecture = architecture_of(file)
        config = architecture.read_config(file)
        vocabulary_kernels = tokenizer_kernels(file)  # may reject the file, so this runs before anything slow
        self.plan = architecture.plan(file, config)
        n_threads = options.threads or default_threads()
        max_sequences, kv_type = options.max_sequences, options.kv_type
        if set(self.plan.windows) <= {0} and not self.plan.states:  # otherwise, each sequence needs memory of its own
            max_sequences += options.cached_prefixes
        context_size, n_blocks = cache_size(file, self.plan, options, config.train_context, n_threads)
        memory = [allocate(prod(shape), "KV cache").reshape(shape) for shape in kv_shapes(self.plan, n_blocks, kv_type)]
        states = [
            allocate(prod(shape), "recurrent states").reshape(shape) for shape in state_shapes(self.plan, max_sequences)
        ]
        ropes = [rope.in_context(context_size) for rope in self.plan.ropes]
        self._rotations = Rotations(ropes)
        packed = reserve(self.plan.matrices)
        self.lowered = lower(self.plan, packed, memory, states, kv_type=kv_type, max_rows=MAX_ROWS, n_threads=n_threads)
        # Load all kernels in one call, so that the first run compiles them in parallel. The sampling kernel takes long,
        # so it comes first: started last, it would keep one core busy after the others have finished.
        kernels = [*ENGINE_KERNELS, *self.lowered.kernels, *packing_kernels(self.plan.matrices), *TEAM_KERNELS]
        load_kernels([*kernels, *vocabulary_kernels], _compile_progress(options.progress))
        self.lowered.link()
        with filling(packed, n_threads) as weights:
            self.tokenizer: Tokenizer = load_tokenizer(file)
            options.on_tokenizer(self.tokenizer)
            weights.finish(_load_progress(options.progress))
        key = key_of(_decisive(file, self.plan, ropes, kv_type)) if options.saves_state else ""
        file.check_unchanged()
        by_window = {
            window: [part for group, part in zip(self.plan.groups, memory, strict=True) if group.shape.window == window]
            for window in self.plan.windows
        }
        checkpoints = [
            allocate(prod(shape), "checkpoints of recurrent states").reshape(shape)
            for shape in checkpoint_shapes(self.plan.states, n_checkpoints(self.plan.states, max_sequences))
        ]
        self._states = (
            RecurrentStates(self.plan.states, states, checkpoints, keeps_rows=options.keeps_rows) if states else None
        )
        self.kv = PagedKV(by_window, max_sequences, context_size, self._states, key)
        self._team: Team = Team(self.lowered, n_threads)
        self.info = describe(
            file,
            vocabulary_size=len(file.strings("tokenizer.ggml.tokens")),
            train_context=config.train_context,
            context_size=context_size,
            max_sequences=max_sequences,
            backend="cpu",
            device=f"{threads_in_words(n_threads)}, {host_target().level.name}",
            threads=n_threads,
            kv_type=kv_type,
            kv_bytes=sum(group.nbytes for group in [*memory, *states, *checkpoints]),
            batch_invariant=True,
        )

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run a forward pass in steps of at most MAX_ROWS rows, in order. See Backend.forward."""
        check_batch(batch, self.info, self.kv.lengths)
        sequences = batch.seq.tolist()
        before = {seq: self.kv.lengths[seq] for seq in sequences}
        logits = np.empty((int(batch.want.sum()), self.lowered.logits_width), np.float32)
        try:
            if len(sequences) > MAX_ROWS:
                self.kv.require(Counter(sequences))
            done = 0
            for start in range(0, len(sequences), MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                self.kv.extend(Counter(sequences[rows]))
                wanted = np.flatnonzero(batch.want[rows]).astype(np.int32)
                self._run(batch, rows, wanted, logits[done:])
                done += len(wanted)
        except BaseException:
            # After several steps, the window at the former length may be incomplete, and `truncate` then keeps nothing.
            # A recurrent state may be past the former length, and `truncate` then goes back to a checkpoint.
            for seq, length in before.items():
                if self.kv.lengths[seq] > length:  # not if the cache was full: truncating nothing means a new request
                    self.kv.truncate(seq, length)
            raise
        finally:
            self._team.clear_cancel()
        return logits[:, : self.info.vocabulary_size]

    def _run(self, batch: Batch, rows: slice, wanted: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        positions = np.ascontiguousarray(batch.pos[rows], np.int32)
        inputs = (
            np.ascontiguousarray(batch.tokens[rows], np.int32),
            positions,
            self.kv.table_addresses(batch.seq[rows]),
            wanted,
            self._rotations.of(positions),
            logits,
        )
        if self._states is None:
            self._team.run(*inputs)
            return
        runs = self._states.begin(runs_of(batch.seq[rows].tolist(), positions.tolist(), batch.want[rows].tolist()))
        try:
            self._team.run(*inputs, runs)
            self._states.finish()
        except BaseException:  # a signal handler may raise even after the step, or inside `finish`
            self._states.lose()
            raise

    @contextmanager
    def timed(self) -> Iterator[TimedTeam]:
        """Run the steps of the `with` block on a team that times every op (timed_team.py).

        Other threads must not run steps during the block.
        """
        with self._replaced(TimedTeam(self.lowered, self.info.threads)) as timed:
            yield timed

    def op_digests(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
        """Run the first tokens of a sequence in one step, and return the name and the output's digest of each op.

        The last digest is that of the logits of all tokens. Sequence 0 must be empty, and is empty afterwards.
        """
        n = len(tokens)
        rows = np.arange(n, dtype=np.int32)
        with self._replaced(WatchedTeam(self.lowered, self.info.threads)) as watched:
            try:
                self.forward(Batch(np.array(tokens, np.int32), np.zeros(n, np.int32), rows, np.ones(n, np.bool_)))
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
        self._team.close()


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
    report = progress
    return lambda done, total: report(f"compiling kernels {done}/{total} (first run only)", done / total)


def _load_progress(progress: Progress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    report = progress
    return lambda done, total: report("loading weights", done / total)
