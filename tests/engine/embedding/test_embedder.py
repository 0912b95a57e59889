"""Tests of batches of texts on a scripted backend, whose hidden states count the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.base import KVCache
from llmrun.backends.scripted import HIDDEN_SIZE, ScriptedBackend
from llmrun.base.errors import ModelFileError, UsageError
from llmrun.base.types import Adapter, Batch, Outputs, Pooling
from llmrun.engine.costs import MOST_ROWS
from llmrun.engine.embedding import Embedder, EmbeddingJob, normalized
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TextDelta, TextPrompt, TokenPrompt
from llmrun.engine.slots import Neighbours, SequenceSlots

texts = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=8)


class Few(Neighbours):
    """Neighbours that leave few rows to texts."""

    def __init__(self, kv: KVCache, rows: int) -> None:
        super().__init__(kv)
        self.rows = rows

    def rows_beside_answers(self) -> int:
        return self.rows


def embedder(pooling: Pooling | None = None, rows: int = MOST_ROWS, **options: int) -> tuple[ScriptedBackend, Embedder]:
    backend = ScriptedBackend(**{"max_sequences": 4, "context_size": 512, **options})  # type: ignore[arg-type]
    return backend, Embedder(
        backend, SequenceSlots(backend.kv, backend.info.max_sequences), pooling, Few(backend.kv, rows)
    )


def finished(one: Embedder, *jobs: EmbeddingJob) -> None:
    for job in jobs:
        one.add(job)
    for _ in range(10_000):
        if one.idle:
            return
        one.step()
    raise AssertionError("the jobs do not end")


def job_of(wanted: Sequence[Sequence[int]], done: list[EmbeddingJob], **options: object) -> EmbeddingJob:
    return EmbeddingJob(wanted, done.append, **options)  # type: ignore[arg-type]


def counts(tokens: Sequence[int]) -> np.ndarray:
    return np.bincount(np.array(tokens) % HIDDEN_SIZE, minlength=HIDDEN_SIZE).astype(np.float32)


@pytest.mark.push
@given(
    st.lists(texts, min_size=1, max_size=4),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([40, 100, 4096]),
    st.sampled_from([1, 7, 256]),
)
def test_each_text_gets_its_own_vector(wanted: list[list[list[int]]], sequences: int, capacity: int, rows: int) -> None:
    """With few sequences, a small cache or few rows, the texts take several passes."""
    backend, one = embedder(rows=rows, max_sequences=sequences, capacity=capacity)
    done: list[EmbeddingJob] = []
    jobs = [job_of(each, done, tenant=str(number % 2)) for number, each in enumerate(wanted)]
    finished(one, *jobs)
    assert sorted(map(id, done)) == sorted(map(id, jobs))
    for job, each in zip(jobs, wanted, strict=True):
        np.testing.assert_array_equal(job.results, [normalized(counts(tokens)) for tokens in each])
    assert backend.kv.used == 0
    assert max(len(batch.tokens) for batch in backend.batches) <= rows


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_mean_has_the_same_bits_in_passes_of_any_size(rows: int) -> None:
    text = [int(token) for token in np.random.default_rng(0).integers(0, 255, 100)]
    results = []
    for most in (rows, MOST_ROWS):
        _, one = embedder(Pooling.MEAN, rows=most)
        job = job_of([text], [])
        finished(one, job)
        results += job.results
    assert results[0].tobytes() == results[1].tobytes()


def test_texts_share_passes_and_are_divided_among_them() -> None:
    backend, one = embedder(max_sequences=4)
    finished(one, job_of([[1] * 100, [2] * 100, [3] * 100, [4] * 400], []))
    assert [len(batch.tokens) for batch in backend.batches] == [256, 256, 188]


def test_texts_that_see_all_positions_are_not_divided() -> None:
    rows: list[int] = []
    backend = ScriptedBackend(max_sequences=4, context_size=512)
    backend.info = replace(backend.info, has_logits=False)
    one = Embedder(backend, SequenceSlots(backend.kv, 4), on_pass=rows.append)
    finished(one, job_of([[1] * 100, [2] * 100, [3] * 400, [4] * 30], []))
    assert [len(batch.tokens) for batch in backend.batches] == rows == [200, 400, 30]


def test_jobs_take_turns() -> None:
    _, one = embedder()
    done: list[EmbeddingJob] = []
    large, small = job_of([[1] * 200] * 50, done), job_of([[2] * 10], done)
    finished(one, large, small)
    assert done == [small, large]


def test_tenants_take_turns_however_many_jobs_they_have() -> None:
    """The texts of the first tenant fill several passes."""
    _, one = embedder(max_sequences=2)
    done: list[EmbeddingJob] = []
    many = [job_of([[1] * 300], done, tenant="a") for _ in range(20)]
    small = job_of([[2] * 10], done, tenant="b")
    for job in [*many, small]:
        one.add(job)
    for _ in range(3):
        one.step()
    assert small in done
    finished(one)
    assert len(done) == 21


def test_the_mean_wants_all_rows_and_scores_one() -> None:
    backend, one = embedder(Pooling.MEAN)
    finished(one, job_of([[5, 6]], []))
    assert np.count_nonzero(backend.batches[0].want) == 2
    backend, one = embedder(Pooling.RANK)
    job = job_of([[5, 6]], [])
    finished(one, job)
    assert np.count_nonzero(backend.batches[0].want) == 1
    assert job.results[0].shape == (1,)


def test_vectors_have_the_form_that_was_asked_for() -> None:
    _, one = embedder()
    raw, short = job_of([[0, 1, 1]], [], normalize=False), job_of([[0, 1, 1]], [], dimensions=2)
    finished(one, raw, short)
    assert raw.results[0].tolist() == counts([0, 1, 1]).tolist()
    np.testing.assert_allclose(short.results[0], np.array([1, 2]) / np.sqrt(5), rtol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "scores", "dimensions", "words"),
    [
        (Pooling.LAST, True, None, "cannot rank"),
        (Pooling.RANK, False, None, "does not compute embeddings"),
        (Pooling.LAST, False, HIDDEN_SIZE + 1, f"must be 1 to {HIDDEN_SIZE}"),
    ],
)
def test_jobs_that_the_model_cannot_do_are_refused(
    pooling: Pooling, scores: bool, dimensions: int | None, words: str
) -> None:
    _, one = embedder(pooling)
    with pytest.raises(UsageError, match=words):
        one.check(job_of([], [], dimensions=dimensions), scores=scores)


def test_dropped_jobs_are_not_run() -> None:
    backend, one = embedder()
    done: list[EmbeddingJob] = []
    job = job_of([[1]], done)
    one.add(job)
    one.drop(job)
    one.drop(job)
    one.step()
    assert (one.idle, done, backend.batches) == (True, [], [])


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    class Broken(ScriptedBackend):
        def forward(self, batch: Batch) -> Outputs:
            outputs = super().forward(batch)
            outputs.hidden[batch.tokens[batch.want > 0] == 9] = np.nan
            return outputs

    backend, done = Broken(max_sequences=4), list[EmbeddingJob]()
    one = Embedder(backend, SequenceSlots(backend.kv, 4))
    broken, fine = job_of([[1], [9], [9], [1]], done), job_of([[1], [2]], done)
    finished(one, broken, fine)
    assert sorted(map(id, done)) == sorted(map(id, [broken, fine]))
    assert (len(fine.results), fine.error) == (2, None)
    with pytest.raises(ModelFileError, match="the vector of input 1"):
        raise broken.error or AssertionError
    assert backend.kv.used == 0


def test_adapters_have_the_scales_with_which_they_were_opened() -> None:
    """As in requests that choose no adapters. An activated one begins at its invocation tokens."""
    adapters = (Adapter("a", "a", 0.5, (), "a"), Adapter("b", "b", 2.0, (7, 8), "b"))
    backend = ScriptedBackend(max_sequences=4, adapters=adapters)
    finished(Embedder(backend, SequenceSlots(backend.kv, 4)), job_of([[1, 7, 8], [1]], []))
    np.testing.assert_array_equal(backend.batches[0].scales, [[0.5, 0], [0.5, 2], [0.5, 2], [0.5, 0]])


def test_a_dropped_job_leaves_its_room_to_others() -> None:
    _, one = embedder(rows=32, max_sequences=2, capacity=512)
    done: list[EmbeddingJob] = []
    dropped, other = job_of([[1] * 400], done), job_of([[2] * 400], done)
    one.add(dropped)
    for _ in range(3):
        one.step()
    one.drop(dropped)
    finished(one, other)
    assert done == [other]


@pytest.mark.push
@pytest.mark.parametrize("share", [1, 2])
def test_endless_requests_do_not_keep_a_long_text_waiting(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    """Each takes half of the cache, or all of it, and another one always waits. The text needs most of it."""
    monkeypatch.setattr("llmrun.engine.embedding.LONGEST_WAIT_S", 0.0)
    with Engine(ScriptedBackend(max_sequences=2, context_size=1024, capacity=1024 * share)) as engine:
        one, done, ended = engine.embedder(), list[EmbeddingJob](), 0
        one.add(job_of([[1] * 1000], done))
        for _ in range(4000):
            while len(engine._requests.waiting) < 2:
                engine.submit(Request(TokenPrompt([2] * 900), 100))
            one.step()
            ended += sum(isinstance(event, Finished) for event in engine.step())
            if done:
                break
        [job] = done
        np.testing.assert_array_equal(job.results, [normalized(counts([1] * 1000))])
        one.step()
        while not engine.idle:  # requests no longer wait
            one.step()
            ended += sum(isinstance(event, Finished) for event in engine.step())
        assert ended > 2


@pytest.mark.push
def test_texts_run_few_rows_beside_answers() -> None:
    """The rows are as many as a prompt would get, so that answers hardly wait."""
    backend = ScriptedBackend(max_sequences=4, context_size=4096, step_seconds=0.01)
    with Engine(backend) as engine:
        one = engine.embedder()
        engine.submit(Request(TextPrompt("Once"), 40))
        while engine.status().generated_tokens < 3:
            engine.step()
        one.add(job_of([[1] * 1000] * 2, []))
        backend.batches.clear()
        one.step()
        assert len(backend.batches[0].tokens) <= 64
        while not engine.idle:
            engine.step()
        one.step()
        assert len(backend.batches[-1].tokens) == MOST_ROWS


def test_answers_in_progress_do_not_change() -> None:
    """Texts use the sequences of no request, and wait if there is none."""
    with Engine(ScriptedBackend(max_sequences=2, context_size=128, capacity=160)) as engine:
        plain = "".join(
            event.text for event in engine.generate(Request(TextPrompt("Once"), 40)) if isinstance(event, TextDelta)
        )
        one = engine.embedder()
        job = job_of([[1] * 100] * 10, [])
        one.add(job)
        for _ in range(2):
            engine.submit(Request(TextPrompt("Once"), 40))
        said, ended = "", 0
        while not engine.idle or not one.idle:
            one.step()
            for event in engine.step():
                said += event.text if isinstance(event, TextDelta) else ""
                ended += isinstance(event, Finished)
        assert sorted(said) == sorted(2 * plain)
        assert (ended, len(job.results)) == (2, 10)
