"""The contract between backends and the engine. Each backend's test file subclasses SeamContract to open the
backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llmrun.backends.base import CHECKPOINT_PART, SavedPart
from llmrun.base.errors import Cancelled, IntegrityError, KVFull
from llmrun.base.types import HIDDEN, LOGITS, Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend

CONTEXT = 128


def rows(seq: int, start: int, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (token, sequence, position) for consecutive rows."""
    return [(token, seq, start + offset) for offset, token in enumerate(tokens)]


def batch_of(triples: Sequence[tuple[int, int, int]]) -> Batch:
    """Return a batch that requests the logits of every row."""
    columns = np.array(triples, np.int32).reshape(-1, 3)
    tokens, seq, pos = (np.ascontiguousarray(column) for column in columns.T)
    return Batch(tokens, seq, pos, np.ones(len(triples), np.uint8))


def as_loaded(parts: Sequence[SavedPart]) -> list[SavedPart]:
    """Return parts with copies of their data, as if they had been read from a file."""
    copies = [bytes(part.read()) for part in parts]
    assert [len(data) for data in copies] == [part.n_bytes for part in parts]
    return [replace(part, read=partial(bytes, data)) for part, data in zip(parts, copies, strict=True)]


class Comparison:
    """Comparison of logits, exact or with a tolerance.

    `exact` is False for backends whose results depend on the batch. They may differ by half a percent of the range of
    the logits (llama.cpp on tiny models: 0.05 %).
    """

    exact = True

    def assert_same(self, actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        assert actual.dtype == np.float32
        if self.exact:
            np.testing.assert_array_equal(actual, expected)
        else:
            np.testing.assert_allclose(actual, expected, rtol=0, atol=0.005 * float(np.ptp(expected)))


class SeamContract(Comparison):
    """The contract. Subclasses implement `open_backend`.

    `goes_back` is False for models with a recurrent state or a window, which may keep less of a prefix than requested.
    """

    goes_back = True

    def assert_kept(self, kept: int, n: int) -> None:
        assert kept == n if self.goes_back else 0 <= kept <= n

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        raise NotImplementedError

    @contextmanager
    def opened(self, max_sequences: int = 1, context_size: int = CONTEXT) -> Iterator[Backend]:
        backend = self.open_backend(context_size=context_size, max_sequences=max_sequences)
        try:
            yield backend
        finally:
            backend.close()

    def tokens(self, backend: Backend, count: int, seed: int = 1) -> list[int]:
        """Return ids of random tokens that are neither control tokens nor end-of-generation tokens."""
        usable = [i for i in range(backend.info.vocabulary_size) if backend.tokenizer.token_bytes(i)]
        return [usable[i] for i in np.random.default_rng(seed).integers(0, len(usable), count)]

    def test_info_agrees_with_the_tokenizer_and_the_logits(self) -> None:
        with self.opened() as backend:
            logits = backend.forward(batch_of(rows(0, 0, self.tokens(backend, 3)))).logits
            assert logits.shape == (3, backend.info.vocabulary_size)
            assert backend.tokenizer.vocabulary_size == backend.info.vocabulary_size
            assert backend.info.context_size == CONTEXT
            assert backend.kv.capacity >= CONTEXT

    def test_only_the_wanted_rows_come_back_and_in_order(self) -> None:
        with self.opened() as backend:
            batch = batch_of(rows(0, 0, self.tokens(backend, 5)))
            full = backend.forward(batch).logits
            backend.kv.free(0)
            want = np.array([0, LOGITS, 0, 0, LOGITS], np.uint8)
            self.assert_same(backend.forward(replace(batch, want=want)).logits, full[[1, 4]])

    def test_each_row_gives_what_it_wants(self) -> None:
        with self.opened() as backend:
            batch = batch_of(rows(0, 0, self.tokens(backend, 70)))
            full = backend.forward(replace(batch, want=np.full(70, LOGITS | HIDDEN, np.uint8)))
            assert full.hidden.shape == (70, backend.info.hidden_size)
            for rate in (1, 5, 60):
                backend.kv.free(0)
                want = np.random.default_rng(rate).integers(0, 4 * rate, 70, np.uint8)
                want[want > 3] = 0
                found = backend.forward(replace(batch, want=want))
                self.assert_same(found.logits, full.logits[want & LOGITS != 0])
                self.assert_same(found.hidden, full.hidden[want & HIDDEN != 0])

    def test_a_single_row_gives_its_hidden_state(self) -> None:
        with self.opened() as backend:
            prompt = self.tokens(backend, 9)
            batch = batch_of(rows(0, 0, prompt))
            whole = backend.forward(replace(batch, want=np.full(9, HIDDEN, np.uint8))).hidden
            backend.kv.free(0)
            backend.forward(batch_of(rows(0, 0, prompt[:-1])))
            last = replace(batch_of(rows(0, 8, prompt[-1:])), want=np.full(1, HIDDEN, np.uint8))
            self.assert_same(backend.forward(last).hidden, whole[-1:])

    @pytest.mark.parametrize("chunk", [1, 7, 32])
    def test_logits_do_not_depend_on_the_chunk(self, chunk: int) -> None:
        with self.opened() as backend:
            prompt = self.tokens(backend, 70)
            whole = backend.forward(batch_of(rows(0, 0, prompt))).logits
            backend.kv.free(0)
            parts = [
                backend.forward(batch_of(rows(0, at, prompt[at : at + chunk]))).logits
                for at in range(0, len(prompt), chunk)
            ]
            self.assert_same(np.concatenate(parts), whole)

    def test_logits_do_not_depend_on_the_neighbours(self) -> None:
        with self.opened(max_sequences=8) as backend:
            prompts = [self.tokens(backend, 5 + 3 * seq, seed=seq) for seq in range(8)]
            alone = []
            for prompt in prompts:
                alone.append(backend.forward(batch_of(rows(0, 0, prompt))).logits)
                backend.kv.free(0)
            together = backend.forward(
                batch_of([row for seq, prompt in enumerate(prompts) for row in rows(seq, 0, prompt)])
            ).logits
            self.assert_same(together, np.concatenate(alone))

    def test_a_truncated_sequence_goes_on_as_if_it_had_ended_there(self) -> None:
        with self.opened() as backend:
            prompt, other = self.tokens(backend, 40), self.tokens(backend, 10, seed=2)
            backend.forward(batch_of(rows(0, 0, prompt)))
            kept = backend.kv.truncate(0, 23)
            self.assert_kept(kept, 23)
            continued = backend.forward(batch_of(rows(0, kept, prompt[kept:23] + other))).logits[-10:]
            backend.kv.free(0)
            self.assert_same(continued, backend.forward(batch_of(rows(0, 0, prompt[:23] + other))).logits[-10:])

    def test_a_copied_prefix_is_shared_and_not_disturbed(self) -> None:
        with self.opened(max_sequences=3) as backend:
            prompt, left, right = (self.tokens(backend, n, seed=n) for n in (37, 9, 11))
            backend.forward(batch_of(rows(0, 0, prompt)))
            kept = backend.kv.copy(0, 1, 30)
            self.assert_kept(kept, 30)
            branches = backend.forward(batch_of(rows(0, 37, left) + rows(1, kept, prompt[kept:30] + right))).logits
            fresh_left = backend.forward(batch_of(rows(2, 0, prompt + left))).logits[-9:]
            backend.kv.free(2)
            fresh_right = backend.forward(batch_of(rows(2, 0, prompt[:30] + right))).logits[-11:]
            self.assert_same(branches[:9], fresh_left)
            self.assert_same(branches[-11:], fresh_right)

    def test_copying_over_a_sequence_frees_it_first(self) -> None:
        with self.opened(max_sequences=2) as backend:
            prompt = self.tokens(backend, CONTEXT // 2)
            backend.forward(batch_of(rows(0, 0, prompt)))
            for _ in range(8):  # two copies fit in the cache, eight do not
                kept = backend.kv.copy(0, 1, len(prompt) - 1)
                backend.forward(batch_of(rows(1, kept, prompt[kept:])))

    def test_a_freed_sequence_starts_anew(self) -> None:
        with self.opened() as backend:
            prompt = self.tokens(backend, 12)
            first = backend.forward(batch_of(rows(0, 0, prompt))).logits
            backend.kv.free(0)
            self.assert_same(backend.forward(batch_of(rows(0, 0, prompt))).logits, first)

    def test_a_saved_sequence_continues_in_another_backend(self) -> None:
        with self.opened(max_sequences=2) as backend:
            prompt, more = self.tokens(backend, 77), self.tokens(backend, 9, seed=2)
            backend.forward(batch_of(rows(1, 0, prompt)))
            parts = as_loaded(backend.kv.save(1, 77))
            assert {part.end for part in parts} <= set(range(78))
            expected = backend.forward(batch_of(rows(1, 77, more))).logits
        with self.opened(max_sequences=2) as backend:
            backend.forward(batch_of(rows(0, 0, self.tokens(backend, 20, seed=3))))  # replaced by the loaded sequence
            kept = backend.kv.load(0, parts)
            self.assert_kept(kept, 77)
            self.assert_same(backend.forward(batch_of(rows(0, kept, prompt[kept:] + more))).logits[-9:], expected)

    def test_a_loaded_prefix_can_be_shortened_and_copied(self) -> None:
        with self.opened(max_sequences=3) as backend:
            prompt, other = self.tokens(backend, 60), self.tokens(backend, 11, seed=2)
            backend.forward(batch_of(rows(0, 0, prompt)))
            backend.kv.load(1, as_loaded(backend.kv.save(0, 40)))  # some backends save all 60
            kept = backend.kv.copy(1, 2, min(33, backend.kv.truncate(1, 33)))
            actual = backend.forward(batch_of(rows(2, kept, prompt[kept:33] + other))).logits[-11:]
            backend.kv.free(0)
            self.assert_same(actual, backend.forward(batch_of(rows(0, 0, prompt[:33] + other))).logits[-11:])

    def test_nothing_is_loaded_from_a_damaged_part_on(self) -> None:
        def damaged() -> bytes:
            raise IntegrityError("damaged")

        with self.opened(max_sequences=2) as backend:
            prompt = self.tokens(backend, 77)
            backend.forward(batch_of(rows(0, 0, prompt)))
            parts = as_loaded(backend.kv.save(0, 77))
            expected = backend.forward(batch_of(rows(0, 77, prompt[:3]))).logits
            for index, part in enumerate(parts):
                for bad in (replace(part, read=damaged), replace(part, n_bytes=part.n_bytes + 1)):
                    kept = backend.kv.load(1, [*parts[:index], bad, *parts[index + 1 :]])
                    assert 0 <= kept < part.end or part.kind == CHECKPOINT_PART
                    actual = backend.forward(batch_of(rows(1, kept, prompt[kept:] + prompt[:3]))).logits[-3:]
                    self.assert_same(actual, expected)

    def test_the_logits_belong_to_the_caller(self) -> None:
        with self.opened() as backend:
            prompt = self.tokens(backend, 12)
            first = backend.forward(batch_of(rows(0, 0, prompt[:6]))).logits
            copy = first.copy()
            backend.forward(batch_of(rows(0, 6, prompt[6:])))
            np.testing.assert_array_equal(first, copy)

    def test_a_cancel_with_nothing_running_stops_the_next_pass_and_no_other(self) -> None:
        """The cancellation may have been meant for that pass: the caller of `cancel` cannot know whether it has
        started."""
        with self.opened() as backend:
            batch = batch_of(rows(0, 0, self.tokens(backend, 10)))
            for _ in range(2):
                backend.cancel()
                with pytest.raises(Cancelled):
                    backend.forward(batch)
            backend.forward(batch)

    def test_cancel_leaves_no_trace(self) -> None:
        """This holds whether the cancellation comes in time or not."""
        with self.opened() as backend:
            prompt, long = self.tokens(backend, 10), self.tokens(backend, 100, seed=2)
            expected = backend.forward(batch_of(rows(0, 0, prompt + long))).logits[10:]
            backend.kv.free(0)
            backend.forward(batch_of(rows(0, 0, prompt)))
            timer = threading.Timer(0.002, backend.cancel)
            timer.start()
            try:
                actual = backend.forward(batch_of(rows(0, 10, long))).logits
            except Cancelled:
                timer.join()
                kept = backend.kv.truncate(0, 10)
                self.assert_kept(kept, 10)
                actual = backend.forward(batch_of(rows(0, kept, prompt[kept:] + long))).logits[-100:]
            self.assert_same(actual, expected)
            timer.join()

    def test_close_may_be_called_twice(self) -> None:
        backend = self.open_backend(context_size=CONTEXT, max_sequences=1)
        backend.close()
        backend.close()


class FullCacheContract(Comparison):
    """For backends whose cache can be smaller than the longest sequence."""

    def open_with_capacity(self, capacity: int, *, context_size: int, max_sequences: int) -> Backend:
        raise NotImplementedError

    def test_a_full_cache_says_so_before_anything_changes(self) -> None:
        backend = self.open_with_capacity(CONTEXT, context_size=CONTEXT, max_sequences=2)
        try:
            tokens = [i % 200 for i in range(backend.kv.capacity)]
            expected = backend.forward(batch_of(rows(0, 0, tokens[:100]))).logits
            backend.kv.truncate(0, 50)
            backend.kv.free(1)
            with pytest.raises(KVFull):
                backend.forward(batch_of(rows(1, 0, tokens)))
            kept = backend.kv.truncate(0, 50)
            self.assert_same(backend.forward(batch_of(rows(0, kept, tokens[kept:100]))).logits[-1], expected[-1])
        finally:
            backend.close()
