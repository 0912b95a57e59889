"""The sampler, which draws the tokens of all rows of a step in one kernel call.

The kernel is kernels/sampling/chain.py. sampling.py is a readable implementation that computes the same bits. For
requests that use other samplers, or another order, samplers.py draws the tokens (`needs_samplers`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from llmrun.base.errors import LlmrunError
from llmrun.base.sampling_texts import DEFAULT_SAMPLERS, parse_breakers, parse_samplers
from llmrun.engine import samplers, sampling
from llmrun.engine.samplers import Breakers, SamplerState, initial_state, uses_dry, uses_xtc
from llmrun.formats.layouts import records
from llmrun.formats.layouts import tokens as layout
from llmrun.formats.layouts.arena import address_of, allocate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.tokenizers.text_tokenizer import Tokenizer
    from llmrun.options.sampling_params import SamplingParams

    Logits = NDArray[np.float32]
    Masks = NDArray[np.uint32]

# With at least this many logits, rows are divided among threads. Milliseconds with one and with two threads, for normal
# random logits on an AMD Zen 3:
#
#   rows x vocabulary   8 x 49,152   4 x 151,936   16 x 49,152   16 x 151,936
#   default sampling    0.67  1.07    0.49  0.65    1.15  0.99     3.0   2.3
#   top-p alone         3.7   3.2     5.4   3.3     6.9   4.2     20.8  11.5
_MANY_LOGITS = 1 << 19
_ROW_BYTES = layout.ROW_BYTES
_ID_BYTES = 4
_CLAIM, _ARGS = records.OP_CLAIM // records.WORD, records.OP_ARGS // records.WORD
_NO_IDS, _NO_BIASES = np.zeros(0, np.int32), np.zeros(0, np.float32)
_DEFAULT_ORDER = parse_samplers(DEFAULT_SAMPLERS)


def needs_samplers(params: SamplingParams) -> bool:
    """Return whether a request needs samplers.py, because of the order or a sampler that is only implemented there."""
    return (
        parse_samplers(params.samplers) != _DEFAULT_ORDER
        or uses_dry(params)
        or params.top_n_sigma > 0
        or params.typical_p < 1
        or uses_xtc(params)
        or params.dynatemp_range > 0
        or params.mirostat != 0
        or params.adaptive_target >= 0
    )


class SequenceRows(Struct, frozen=True):
    """Consecutive rows of one sequence, whose tokens are drawn in order.

    logits    float32[1 + len(draft), vocabulary], not modified; or no rows, to draw nothing
    history   all tokens before the first draw, including the prompt
    position  the position of the first token to draw
    draft     the tokens that the rows assume: row i is valid only if the tokens drawn before it equal draft[:i]
    masks     uint32[rows, mask_words]: the tokens that a constraint allows in each row; None if it allows all
    state     the state of the samplers before the first row; None for the initial state
    tokenizer finds DRY's sequence breakers and the texts that the infill sampler compares; None disables both
    """

    logits: Logits
    history: Sequence[int]
    params: SamplingParams
    position: int
    draft: Sequence[int] = ()
    masks: Masks | None = None
    state: SamplerState | None = None
    tokenizer: Tokenizer | None = None


class Drawn(Struct, frozen=True):
    """The tokens drawn for SequenceRows.

    tokens  one token per row, up to and including the first that differs from the draft
    error   the error of the row after these tokens, or None; it is the error that `sampling.sample` raises
    states  the states of the samplers before the first token and after each one; () for the kernel, which has none
    """

    tokens: list[int]
    error: LlmrunError | None = None
    states: Sequence[SamplerState] = ()

    def has_row(self, index: int, state: SamplerState) -> bool:
        """Return whether the row with this index was drawn, given the state of the samplers before it."""
        drawn = index < len(self.tokens) + (self.error is not None)
        return drawn and (not self.states or self.states[index] == state)


class Sampler:
    """Draws tokens. Methods must not be called from several threads at the same time.

    The kernel runs the default samplers, and NumPy runs all others (samplers.py).
    """

    def __init__(self, n_threads: int = 1) -> None:
        """Load the kernel. Raises KernelCompileError.

        n_threads  the most threads to use when there are many rows; 0 means one
        """
        from llmrun.base.compiled.host import load_kernel  # imported late, so that start-up stays quick

        self._n_threads = max(1, n_threads)
        self._pool: ThreadPoolExecutor | None = None  # started when a step first has many rows
        self._kernel = load_kernel(*layout.SAMPLING_KERNEL)
        self._claim = np.zeros(records.CACHE_LINE // records.WORD, np.int64)
        self._op = np.zeros(records.OP_WORDS, np.int64)
        self._op[_CLAIM] = address_of(self._claim)
        self._op_address = address_of(self._op)
        self._vocabulary = 0
        self._scratch = np.empty(0, np.uint8)
        self._breakers: dict[str, Breakers] = {}  # DRY's sequence breakers, by the parameter's value

    def sample_rows(self, sequences: Sequence[SequenceRows]) -> list[Drawn]:
        """Draw the tokens of sequences with the same vocabulary, with the same result as drawing row by row.

        Rows after a token that differs from the draft are not drawn.
        """
        by_kernel = iter(self._sample_with_kernel([rows for rows in sequences if not needs_samplers(rows.params)]))
        return [self._sample_in_order(rows) if needs_samplers(rows.params) else next(by_kernel) for rows in sequences]

    def _sample_in_order(self, rows: SequenceRows) -> Drawn:
        """Draw the tokens of a sequence with the samplers in samplers.py."""
        tokens: list[int] = []
        states = [rows.state or initial_state(rows.params)]
        known, breakers = list(rows.history), self._breakers_for(rows)
        masks = [None] * len(rows.logits) if rows.masks is None else rows.masks
        for row, mask, draft in zip(rows.logits, masks, [*rows.draft, None], strict=False):
            place = samplers.Place(known, rows.params, rows.position + len(tokens), len(row), breakers, rows.tokenizer)
            try:
                token, state = samplers.sample(row, place, states[-1], mask)
            except LlmrunError as error:
                return Drawn(tokens, error, states)
            tokens.append(token)
            states.append(state)
            known.append(token)
            if token != draft:
                break
        return Drawn(tokens, None, states)

    def _breakers_for(self, rows: SequenceRows) -> Breakers:
        """Return DRY's sequence breakers. A new list of breakers takes a fraction of a second."""
        texts = rows.params.dry_sequence_breakers
        if rows.tokenizer is None or not uses_dry(rows.params):
            return samplers.NO_BREAKERS
        if texts not in self._breakers:
            self._breakers[texts] = samplers.find_breakers(parse_breakers(texts), rows.tokenizer)
        return self._breakers[texts]

    def _sample_with_kernel(self, sequences: Sequence[SequenceRows]) -> list[Drawn]:
        rows = _Rows(sum(len(sequence.logits) for sequence in sequences))
        for sequence in sequences:
            rows.add_sequence(sequence)
        if sequences:
            self._run(rows, sequences[0].logits.shape[1])
        return [rows.take_results(sequence) for sequence in sequences]

    def log_probabilities(self, logits: Logits, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
        """Return the log-probabilities of `token` and of the n likeliest ids, equal to those of sampling.py."""
        rows = _Rows(1)
        ids = np.empty(n, np.int64)
        rows.add_log_probabilities(logits, ids)
        self._run(rows, len(logits))
        status, _, largest, total = rows.output()
        if status == layout.BAD_OUTPUT:
            return sampling.NO_LOG_PROBABILITIES
        return sampling.described_log_probabilities(logits, token, ids.tolist(), largest, total)

    def _run(self, rows: _Rows, vocabulary: int) -> None:
        if vocabulary != self._vocabulary:
            self._prepare(vocabulary)
        self._op[_ARGS : _ARGS + 2] = rows.address, rows.filled
        self._claim[0] = 0
        if rows.filled * vocabulary < _MANY_LOGITS or self._n_threads == 1:
            self._kernel.run(self._op_address, 0, 0, 1)
        else:
            self._run_on_threads(min(self._n_threads, rows.filled))

    def _run_on_threads(self, n: int) -> None:
        """Run the kernel on the calling thread and n - 1 other threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._n_threads - 1, "llmrun-sampler")
        helpers = [self._pool.submit(self._kernel.run, self._op_address, 0, thread, n) for thread in range(1, n)]
        try:
            self._kernel.run(self._op_address, 0, 0, n)
        finally:
            wait(helpers)  # the helper threads use arrays that are about to be freed

    def _prepare(self, vocabulary: int) -> None:
        """Allocate scratch memory for a vocabulary. Threads that never run do not touch their part of the memory."""
        n_bytes = layout.scratch_bytes(vocabulary)
        self._scratch = allocate(self._n_threads * n_bytes, "scratch memory of the sampler")
        self._vocabulary = vocabulary
        words = layout.SamplingWords(
            rows=0,
            n_rows=0,
            vocabulary=vocabulary,
            scratch=address_of(self._scratch),
            scratch_bytes=n_bytes,
            room=layout.scratch_room(vocabulary),
        )
        self._op[_ARGS : _ARGS + len(words)] = words


class _Rows:
    """The row records of one kernel call, and the arrays that they refer to."""

    def __init__(self, n: int) -> None:
        # This is a ctypes array, because reading the address of a NumPy array takes 2.4 us instead of 0.2 us.
        self._records = (ctypes.c_int64 * (n * layout.ROW_WORDS))()
        self._keep: list[object] = []
        self._taken = 0
        self.address = ctypes.addressof(self._records)
        self.filled = 0

    def add_sequence(self, rows: SequenceRows) -> None:
        """Add a record for each row of a sequence."""
        params, logits = rows.params, _contiguous(rows.logits)
        history, ends = _recent_tokens(rows)
        bias_ids, biases = sampling.bias_arrays(params.logit_bias) if params.logit_bias else (_NO_IDS, _NO_BIASES)
        self._keep += [logits, history, bias_ids, biases, rows.masks]
        bias_words = (address_of(bias_ids), address_of(biases), len(bias_ids)) if params.logit_bias else (0, 0, 0)
        first_id = address_of(history) if len(history) else 0
        numbers = (params.temperature, params.top_p, params.min_p)
        penalties = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        address, stride = address_of(logits), logits.strides[0]
        mask, mask_bytes = (0, 0) if rows.masks is None else (address_of(rows.masks), rows.masks.strides[0])
        for index, end in enumerate(ends):
            start = max(0, end - params.repeat_last_n) if params.repeat_last_n >= 0 else 0
            draft = rows.draft[index] if index < len(rows.draft) else layout.NO_TOKEN
            u = sampling.uniform(params.seed, rows.position + index)
            window = (first_id + _ID_BYTES * start, end - start)
            self._add(
                address + index * stride,
                layout.DRAW,
                0,
                *window,
                *bias_words,
                mask + index * mask_bytes,
                index,
                draft,
                params.top_k,
                *numbers,
                *penalties,
                u,
            )

    def add_log_probabilities(self, logits: Logits, top_ids: NDArray[np.int64]) -> None:
        """Add a record that computes the largest logit and the sum of weights, and stores the likeliest ids."""
        logits = _contiguous(logits)
        self._keep += [logits, top_ids]
        draws_nothing = (0, 0, 0, 0, 0, 0, 0, layout.NO_TOKEN, 0, *(0.0,) * 7)
        self._add(address_of(logits), len(top_ids), address_of(top_ids), *draws_nothing)

    def _add(self, *inputs: float) -> None:
        layout.ROW_INPUTS.pack_into(self._records, self.filled * _ROW_BYTES, *inputs, layout.NO_LIMIT, layout.SKIPPED)
        self.filled += 1

    def output(self) -> tuple[int, int, float, float]:
        """Return the status, token, largest logit and total of the next row."""
        at = self._taken * _ROW_BYTES + layout.ROW_STATUS
        self._taken += 1
        status, token, largest, total = layout.ROW_OUTPUTS.unpack_from(self._records, at)
        return status, token, largest, total

    def take_results(self, rows: SequenceRows) -> Drawn:
        """Return the valid results of the next sequence."""
        outputs = [self.output() for _ in rows.logits]
        tokens: list[int] = []
        for (status, token, largest, _), draft in zip(outputs, [*rows.draft, None], strict=False):
            if status == layout.NO_SUCH_TOKEN:
                raise IndexError("a token of the history or of the logit bias is not in the vocabulary")
            if status != layout.DONE:
                return Drawn(
                    tokens, sampling.bad_output(largest) if status == layout.BAD_OUTPUT else sampling.nothing_left()
                )
            tokens.append(token)
            if token != draft:
                break
        return Drawn(tokens)


def _contiguous(logits: Logits) -> Logits:
    """Return logits whose rows are contiguous, because backends may pad rows."""
    rows_are_contiguous = logits.dtype == np.float32 and logits.strides[-1] == logits.itemsize
    return logits if rows_are_contiguous else np.ascontiguousarray(logits, np.float32)


def _recent_tokens(rows: SequenceRows) -> tuple[NDArray[np.int32], Sequence[int]]:
    """Return the tokens to penalize in any row of a sequence, and where each row's history ends among these tokens."""
    last_n = rows.params.repeat_last_n
    if last_n == 0 or not sampling.penalizes(rows.params):
        return _NO_IDS, [0] * len(rows.logits)
    recent = rows.history[-last_n:] if last_n > 0 else rows.history
    return np.array([*recent, *rows.draft], np.int32), range(len(recent), len(recent) + len(rows.logits))
