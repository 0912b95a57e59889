"""The engine's contract over any backend. tests/engine/test_engine_backends.py subclasses these classes per backend.

Each contract class opens its backend once, and every test starts with all sequences freed. Prompts are random tokens:
the content of an answer does not matter, only that it is the same whatever else the engine is doing.
"""

from __future__ import annotations

import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from msgspec import structs

from llmrun.base.types import LOGITS, Batch, FinishReason, Outputs
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.engine.sampling import log_probabilities, sample
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import Gathered, answer_all, run_to_the_end

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, Vision

SEQUENCES = 8


def plain_tokens(backend: Backend, count: int, seed: int) -> list[int]:
    """Return ids of random tokens that are neither control tokens nor end-of-generation tokens."""
    tokenizer = backend.tokenizer
    usable = [i for i in range(tokenizer.vocabulary_size) if tokenizer.token_bytes(i)]
    return [usable[i] for i in np.random.default_rng(seed).integers(0, len(usable), count)]


def cut_by_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string, and that stop string; of two that end together, the longer
    one.

    This is the specification, checked character by character.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


class OverOneBackend:
    """A contract over one backend. Subclasses implement `open_backend` and set these attributes.

    exact      True if answers do not depend on other requests, chunk sizes or cached prefixes;
               False if they only have to be equally good
    tolerance  for backends that are not exact: how many logits a greedy token may be below the best one
    """

    exact = True
    tolerance = 0.0
    context = 192
    answer_tokens = 24
    _known: ClassVar[dict[tuple[object, ...], Gathered]]

    def __init_subclass__(cls) -> None:
        cls._known = {}

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> Backend:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls) -> Iterator[Backend]:
        backend = cls.open_backend(context_size=cls.context, max_sequences=SEQUENCES)
        yield backend
        backend.close()

    @pytest.fixture
    def backend(self, opened: Backend) -> Backend:
        forget_all(opened)
        return opened

    def request(self, backend: Backend, prompt: Sequence[int], max_tokens: int | None = None, seed: int = 0) -> Request:
        """Build a request that ends by its length. It is greedy on inexact backends, where rounding might change a
        draw."""
        never = dict.fromkeys(backend.tokenizer.end_of_generation, -math.inf)
        sampling = SamplingParams(temperature=0.8 if self.exact else 0, seed=seed, logit_bias=never)
        return Request(TokenPrompt(prompt), max_tokens or self.answer_tokens, sampling=sampling)

    def alone(self, backend: Backend, request: Request) -> Gathered:
        """Run the request alone, with an empty cache, and return its events."""
        assert isinstance(request.prompt, TokenPrompt)
        key = (tuple(request.prompt.tokens), request.max_tokens, request.sampling.seed, backend.info.context_size)
        if key not in self._known:
            forget_all(backend)
            [self._known[key]] = answer_all(Engine(backend), [request])
        forget_all(backend)
        return self._known[key]

    def assert_answers(self, backend: Backend, request: Request, gathered: Gathered) -> None:
        """Check that the tokens equal those of the request run alone, or are equally good.

        Equally good means that every token is the best one, or nearly, when prompt and answer run again in one pass.
        The cache is empty afterwards.
        """
        if self.exact:
            expected = self.alone(backend, request).tokens
            if gathered.finished.reason is FinishReason.CANCELLED:
                expected = expected[: len(gathered.tokens)]
            assert gathered.tokens == expected
            return
        assert isinstance(request.prompt, TokenPrompt)
        assert request.sampling.temperature == 0
        history = [*request.prompt.tokens, *gathered.tokens]
        positions = np.arange(len(history), dtype=np.int32)
        want = (positions >= len(request.prompt.tokens) - 1) * np.uint8(LOGITS)
        forget_all(backend)
        logits = backend.forward(Batch(np.array(history, np.int32), np.zeros_like(positions), positions, want)).logits
        forget_all(backend)
        for row, token in zip(logits, gathered.tokens, strict=False):
            best = sample(row, [], request.sampling, position=0)
            assert row[token] >= row[best] - self.tolerance


def forget_all(backend: Backend) -> None:
    for seq in range(backend.info.max_sequences):
        backend.kv.free(seq)


class StopStringContract(OverOneBackend):
    """Stop strings taken from real answers of the model, so that they start and end anywhere in its tokens."""

    places = 1000  # most places of the answer to try

    def answer(self, backend: Backend) -> tuple[Request, str]:
        request = self.request(backend, plain_tokens(backend, 20, seed=3))
        return request, self.alone(backend, request).text

    def assert_stops(self, backend: Backend, request: Request, text: str, stops: tuple[str, ...]) -> None:
        forget_all(backend)  # forces the same passes, because rounding may depend on their shapes
        stopping = Request(request.prompt, request.max_tokens, stops, request.sampling)
        [gathered] = answer_all(Engine(backend), [stopping])
        before, stop = cut_by_stop(text, stops)
        assert (gathered.text, gathered.finished.stop) == (before, stop)
        assert gathered.finished.reason is (FinishReason.LENGTH if stop is None else FinishReason.STOP)

    @pytest.mark.parametrize("length", [1, 2, 7])
    def test_a_stop_string_ends_the_answer_wherever_it_stands(self, backend: Backend, length: int) -> None:
        request, text = self.answer(backend)
        starts = range(len(text) - length + 1)
        assert len(starts) > 2
        for start in random.Random(length).sample(starts, min(self.places, len(starts))):
            self.assert_stops(backend, request, text, (text[start : start + length],))

    def test_of_overlapping_stop_strings_the_first_that_is_whole_counts(self, backend: Backend) -> None:
        request, text = self.answer(backend)
        random_ = random.Random(1)
        for _ in range(min(self.places, 30)):
            at = random_.randrange(len(text))
            near = [max(0, at + random_.randint(-4, 4)) for _ in range(3)]
            stops = tuple({text[start : start + random_.randint(1, 9)] or "!" for start in near})
            self.assert_stops(backend, request, text, stops)

    def test_what_only_begins_like_a_stop_string_is_not_lost(self, backend: Backend) -> None:
        request, text = self.answer(backend)
        for start in random.Random(2).sample(range(len(text)), min(self.places, len(text))):
            self.assert_stops(backend, request, text, (text[start:] + "\0never", text[start : start + 3] + "\0"))


class CompanyContract(OverOneBackend):
    """Several requests at once, with prompts split over steps."""

    @pytest.mark.parametrize("rows_per_step", [1, 7, 256])
    def test_eight_at_once_answer_as_each_alone(self, backend: Backend, rows_per_step: int) -> None:
        requests = [
            self.request(backend, plain_tokens(backend, 5 + 7 * seed, seed), 12, seed) for seed in range(SEQUENCES)
        ]
        together = answer_all(Engine(backend, rows_per_step=rows_per_step), requests)
        for request, gathered in zip(requests, together, strict=True):
            self.assert_answers(backend, request, gathered)
            assert len(gathered.tokens) == 12

    def test_more_than_there_are_sequences_take_turns(self, backend: Backend) -> None:
        requests = [self.request(backend, plain_tokens(backend, 9, seed), 1 + seed % 4, seed) for seed in range(20)]
        together = answer_all(Engine(backend), requests)
        for request, gathered in zip(requests, together, strict=True):
            self.assert_answers(backend, request, gathered)

    def test_latecomers_share_the_beginning_of_those_that_run(self, backend: Backend) -> None:
        stem = plain_tokens(backend, 40, seed=1)
        engine = Engine(backend)
        first = self.request(backend, [*stem, *plain_tokens(backend, 5, seed=2)], 30)
        later = [self.request(backend, [*stem, *plain_tokens(backend, 5, seed)], 10) for seed in (3, 4)]
        ids = [engine.submit(first)]
        events = engine.step()
        ids += [engine.submit(request) for request in later]
        together = run_to_the_end(engine, ids, events=events)
        for request, gathered in zip([first, *later], together, strict=True):
            self.assert_answers(backend, request, gathered)
        for gathered in together[1:]:
            self.assert_kept(gathered.finished.timings.cached_tokens, 40, of=45)

    @pytest.mark.parametrize("rows_per_step", [7, 256])
    def test_samples_of_one_prompt_answer_as_each_alone(self, backend: Backend, rows_per_step: int) -> None:
        prompt = plain_tokens(backend, 70, seed=1)
        requests = [self.request(backend, prompt, 12, seed) for seed in range(SEQUENCES + 2)]
        together = answer_all(Engine(backend, rows_per_step=rows_per_step), requests)
        for request, gathered in zip(requests, together, strict=True):
            self.assert_answers(backend, request, gathered)
        for gathered in together[1:SEQUENCES]:
            assert gathered.finished.timings.cached_tokens == 69

    def assert_kept(self, cached: int, n: int, *, of: int) -> None:
        """Check the number of reused tokens, given that `n` of the `of` tokens in the cache match the prompt."""
        assert cached == n


class EchoContract(CompanyContract):
    """The log-probabilities of prompts."""

    def echoing(self, backend: Backend, prompt: Sequence[int], max_tokens: int = 1) -> Request:
        request = self.request(backend, prompt)
        return structs.replace(request, max_tokens=max_tokens, logprobs=2, echo=True)

    def assert_described(self, backend: Backend, request: Request, gathered: Gathered) -> None:
        """Compare the log-probabilities of a prompt's tokens with those of one forward pass, and empty the cache."""
        assert isinstance(request.prompt, TokenPrompt)
        prompt = [*request.prompt.tokens]
        entries = [entry for piece in gathered.prompt for entry in piece.logprobs]
        assert [entry.chosen.token_id for entry in entries] == prompt
        assert (entries[0].chosen.logprob, entries[0].top) == (0.0, ())
        assert {len(piece.logprobs) for piece in gathered.prompt[:-1]} <= {64}
        forget_all(backend)
        positions = np.arange(len(prompt), dtype=np.int32)
        want = np.full(len(prompt), LOGITS, np.uint8)
        logits = backend.forward(Batch(np.array(prompt, np.int32), np.zeros_like(positions), positions, want)).logits
        forget_all(backend)
        for row, token, entry in zip(logits[:-1], prompt[1:], entries[1:], strict=True):
            chosen, top = log_probabilities(row, token, 2)
            found = [entry.chosen.logprob, *(each.logprob for each in entry.top)]
            assert found == pytest.approx([chosen, *(each for _, each in top)], abs=self.tolerance, rel=0)
            assert not self.exact or [each.token_id for each in entry.top] == [token for token, _ in top]

    @pytest.mark.parametrize("max_tokens", [0, 1, 5])
    @pytest.mark.parametrize("length", [1, 2, 64, 65, 150])
    def test_every_token_of_a_prompt_is_described(self, backend: Backend, length: int, max_tokens: int) -> None:
        request = self.echoing(backend, plain_tokens(backend, length, seed=1), max_tokens)
        [gathered] = answer_all(Engine(backend), [request])
        assert len(gathered.tokens) == len(gathered.logprobs) == max_tokens
        assert gathered.finished.reason is FinishReason.LENGTH
        assert gathered.finished.timings.generated_tokens == max_tokens
        self.assert_described(backend, request, gathered)

    @pytest.mark.parametrize("rows_per_step", [7, 256])
    def test_prompts_are_described_in_company_and_whatever_is_cached(
        self, backend: Backend, rows_per_step: int
    ) -> None:
        engine = Engine(backend, rows_per_step=rows_per_step)
        stem = plain_tokens(backend, 90, seed=1)
        answer_all(engine, [self.request(backend, stem, 3)])
        described = [self.echoing(backend, [*stem, *plain_tokens(backend, 5, seed)], 2) for seed in range(3)]
        others = [self.request(backend, [*stem, *plain_tokens(backend, 9, seed)], 6) for seed in range(3)]
        together = answer_all(engine, [request for pair in zip(described, others, strict=True) for request in pair])
        for request, gathered in zip(described, together[::2], strict=True):
            assert gathered.finished.timings.cached_tokens == 0
            self.assert_described(backend, request, gathered)
        for request, gathered in zip(others, together[1::2], strict=True):
            self.assert_answers(backend, request, gathered)

    def test_an_answer_continues_a_prompt_that_was_only_computed(self, backend: Backend) -> None:
        prompt = plain_tokens(backend, 70, seed=1)
        engine, request = Engine(backend), self.request(backend, prompt, 8)
        [gathered] = answer_all(engine, [structs.replace(request, max_tokens=0)])
        assert (gathered.tokens, gathered.deltas, gathered.finished.context_used) == ([], [], 70)
        [gathered] = answer_all(engine, [request])
        self.assert_kept(gathered.finished.timings.cached_tokens, 69, of=70)
        self.assert_answers(backend, request, gathered)


class PrefixContract(CompanyContract):
    """Prefix reuse in conversations: a new turn, a removed turn, an edited turn."""

    def test_a_conversation_runs_only_what_is_new(self, backend: Backend) -> None:
        question = plain_tokens(backend, 60, seed=1)
        engine = Engine(backend)

        def ask(prompt: list[int]) -> tuple[Request, Gathered]:
            request = self.request(backend, prompt, 10)
            return request, answer_all(engine, [request])[0]

        def ask_knowing(prompt: list[int], n: int, of: int) -> None:
            """Ask while `of` tokens are cached, of which the first `n` also begin the prompt."""
            request, gathered = ask(prompt)
            self.assert_kept(gathered.finished.timings.cached_tokens, n, of=of)
            answers.append((request, gathered))

        answers = [ask(question)]
        history = question + answers[0][1].tokens
        held = len(history) - 1  # the last token was sampled but never run
        next_turn = history + plain_tokens(backend, 15, seed=2)
        ask_knowing(next_turn, held, of=held)
        held = len(next_turn) + 9
        ask_knowing(next_turn, len(next_turn) - 1, of=held)  # the same turn again
        other = [token for token in plain_tokens(backend, 15, seed=3) if token != next_turn[len(history)]]
        ask_knowing(history + other, len(history), of=held)  # replaces the last turn
        held = len(history) + len(other) + 9
        ask_knowing(question[:50] + other, 50, of=held)  # edits the middle of the first question
        for request, gathered in answers:
            self.assert_answers(backend, request, gathered)

    def test_two_conversations_with_one_beginning_keep_their_own(self, backend: Backend) -> None:
        stem = plain_tokens(backend, 20, seed=1)
        sides = [[*stem, *plain_tokens(backend, 40, seed)] for seed in (2, 3)]
        engine = Engine(backend)
        answers = []
        for prompt, known in [(sides[0], 0), (sides[1], 20), (sides[0], 59), (sides[1], 59)]:
            request = self.request(backend, prompt, 1)
            [gathered] = answer_all(engine, [request])
            self.assert_kept(gathered.finished.timings.cached_tokens, known, of=60)
            answers.append((request, gathered))
        for request, gathered in answers:
            self.assert_answers(backend, request, gathered)


# Calls a function after the given number of seconds while the block runs.
Later = Callable[[float, Callable[[], None]], AbstractContextManager[None]]


@contextmanager
def by_thread(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def by_signal(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in the main thread, between any two of its instructions."""
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")

    def handler(number: int, frame: FrameType | None) -> None:
        act()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class CancelContract(OverOneBackend):
    trials = 25

    @pytest.mark.parametrize("later", [by_thread, by_signal])
    def test_a_cancel_at_any_moment_keeps_the_text_and_the_engine(self, backend: Backend, later: Later) -> None:
        """Cancel during a prefill of several passes, between passes and in decode, with three active requests and one
        waiting."""
        requests = [
            self.request(backend, plain_tokens(backend, 100, seed), self.answer_tokens, seed) for seed in range(3)
        ]
        after = self.request(backend, plain_tokens(backend, 30, seed=9), 5)
        started = time.perf_counter()
        answer_all(Engine(backend, rows_per_step=32), requests)
        duration = time.perf_counter() - started
        random_ = random.Random(0)
        reasons = set()
        trials = 0
        while trials < self.trials or FinishReason.CANCELLED not in reasons:
            trials += 1
            assert trials < 100
            forget_all(backend)
            engine = Engine(backend, rows_per_step=32)
            with later(random_.uniform(0, duration), engine.cancel_current):
                cancelled = answer_all(engine, requests)
            assert_books_agree(engine)
            [following] = answer_all(engine, [after])
            assert following.finished.reason is FinishReason.LENGTH
            for request, gathered in [*zip(requests, cancelled, strict=True), (after, following)]:
                reasons.add(gathered.finished.reason)
                said = b"".join(map(backend.tokenizer.token_bytes, gathered.tokens))
                assert gathered.text == said.decode("utf-8", "replace")
                self.assert_answers(backend, request, gathered)

    def test_a_cancel_just_before_a_pass_stops_that_pass(self, backend: Backend) -> None:
        """The engine has already checked for cancellation, and the prefill or decode pass has not started."""
        request = self.request(backend, plain_tokens(backend, 100, seed=1), 5)
        for number in range(6):
            forget_all(backend)
            watched = CancelledBefore(backend, number)
            engine = Engine(watched, rows_per_step=32)
            watched.cancel_engine = engine.cancel_current
            [gathered] = answer_all(engine, [request])
            assert gathered.finished.reason is FinishReason.CANCELLED
            assert (watched.begun, watched.done) == (number + 1, number)
            assert len(gathered.tokens) == max(0, number - 3)
            assert_books_agree(engine)

    def test_a_cancel_for_nobody_stops_nothing(self, backend: Backend) -> None:
        request = self.request(backend, plain_tokens(backend, 20, seed=1), 3)
        engine = Engine(backend)
        for _ in range(2):
            engine.cancel_current()
            engine.cancel(99)
            [gathered] = answer_all(engine, [request])
            assert gathered.finished.reason is FinishReason.LENGTH

    def test_one_of_several_is_cancelled(self, backend: Backend) -> None:
        requests = [self.request(backend, plain_tokens(backend, 10, seed), 8, seed) for seed in range(3)]
        engine = Engine(backend)
        ids = [engine.submit(request) for request in requests]
        events = engine.step()
        engine.cancel(ids[1])
        together = run_to_the_end(engine, ids, events=events)
        length, cancelled = FinishReason.LENGTH, FinishReason.CANCELLED
        assert [gathered.finished.reason for gathered in together] == [length, cancelled, length]
        for request, gathered in zip(requests, together, strict=True):
            self.assert_answers(backend, request, gathered)


class CancelledBefore:
    """A backend that cancels all requests just before pass `number` begins."""

    draft_head = None
    vision: Vision | None = None

    def __init__(self, backend: Backend, number: int) -> None:
        self._backend, self._number = backend, number
        self.info, self.tokenizer, self.kv = backend.info, backend.tokenizer, backend.kv
        self.cancel, self.close = backend.cancel, backend.close
        self.cancel_engine: Callable[[], None] = lambda: None
        self.begun = self.done = 0

    def forward(self, batch: Batch) -> Outputs:
        self.begun += 1
        if self.begun == self._number + 1:
            self.cancel_engine()
        outputs = self._backend.forward(batch)
        self.done += 1
        return outputs


def assert_books_agree(engine: Engine) -> None:
    """Check that the cache holds the tokens the engine believes it holds.

    This is only valid if the backend raised no exceptions other than Cancelled and KVFull.
    """
    kv = engine._backend.kv
    for slot in engine._slots._slots:
        if hasattr(kv, "sequences"):
            assert kv.sequences[slot.index] == slot.tokens
        else:
            assert kv.lengths[slot.index] == len(slot.tokens)  # type: ignore[attr-defined]


class CrowdedContract(OverOneBackend):
    """A cache that is too small for all requests together. Subclasses implement `open_crowded`."""

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> Backend:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def opened_crowded(cls) -> Iterator[Backend]:
        backend = cls.open_crowded(capacity=128, context_size=128, max_sequences=4)
        yield backend
        backend.close()

    @pytest.fixture
    def crowded(self, opened_crowded: Backend) -> Backend:
        forget_all(opened_crowded)
        return opened_crowded

    def test_a_full_cache_delays_requests_and_changes_none(self, crowded: Backend) -> None:
        requests = [self.request(crowded, plain_tokens(crowded, 30, seed), 40, seed) for seed in range(6)]
        engine = Engine(crowded)
        ids = [engine.submit(request) for request in requests]
        together = run_to_the_end(engine, ids, most_steps=6 * 45)  # running them one by one would take 6 * 40 steps
        assert_books_agree(engine)
        for request, gathered in zip(requests, together, strict=True):
            assert gathered.finished.reason is FinishReason.LENGTH
            self.assert_answers(crowded, request, gathered)

    def test_answers_that_fill_the_whole_context_come_one_after_the_other(self, crowded: Backend) -> None:
        requests = [self.request(crowded, plain_tokens(crowded, 60, seed), 1000, seed) for seed in range(3)]
        together = answer_all(Engine(crowded), requests)
        for gathered in together:
            assert gathered.finished.reason is FinishReason.LENGTH
            assert gathered.finished.context_used == 128

    def test_kept_prefixes_make_room_before_anyone_waits(self, crowded: Backend) -> None:
        engine = Engine(crowded)
        for seed in range(5):
            [gathered] = answer_all(engine, [self.request(crowded, plain_tokens(crowded, 70, seed), 20, seed)])
            assert gathered.finished.reason is FinishReason.LENGTH
            assert len(gathered.tokens) == 20
            assert_books_agree(engine)
