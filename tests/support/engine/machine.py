"""A Hypothesis state machine that applies random operations to an engine and checks its invariants after each one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec import structs

from llmrun.base.errors import Cancelled
from llmrun.base.types import FinishReason
from llmrun.engine.costs import StepCosts
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Event, Failed, Finished, Request, TextDelta, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support import tiers
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.engine.answers import answer_all
from tests.support.engine.contract import assert_books_agree, forget_all, plain_tokens
from tests.support.engine.drafts import Adversary, Propose, drafting_engine

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.engine.costs import StepSize


@dataclass
class Expected:
    """The state of an active request according to the machine's model."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    is_alone: bool = False
    is_cancelled: bool = False
    last: Event | None = None


class Timeless(StepCosts):
    """A predictor for which all steps take equally long, so that examples can be repeated."""

    row_seconds = 0.0

    def of_step(self, size: StepSize, prompt_rows: int = 0) -> float:
        return 0.01


class Machine(RuleBasedStateMachine):
    """The state machine. `backend` is under test and has a small cache; `solitary` returns the answer of a request run
    alone, and `propose` its drafts. `options` are those of Engine."""

    def __init__(
        self,
        backend: Backend,
        solitary: Callable[[Request], list[int]] | None,
        propose: Propose | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        with contextlib.suppress(Cancelled):  # consumes a cancellation left over from the previous machine
            forget_all(backend)
            backend.forward(batch_of(rows(0, 0, plain_tokens(backend, 1, seed=0))))
        forget_all(backend)
        self.backend = backend
        self.solitary = solitary
        self.options = {"rows_per_step": 24, "on_begin": self.begin, **options}
        self.engine = Engine(backend, **self.options)
        if propose is not None:
            self.engine = drafting_engine(backend, Adversary(backend, propose, self.sequence), **self.options)
        self.engine._scheduler.costs = Timeless()
        self.requests: dict[int, Expected] = {}
        self.generated_tokens = 0  # as of the last step

    def request(self, prompt: list[int], max_tokens: int, seed: int) -> Request:
        never = dict.fromkeys(self.backend.tokenizer.end_of_generation, -math.inf)
        sampling = SamplingParams(temperature=0.8 if self.solitary else 0, seed=seed, logit_bias=never)
        return Request(TokenPrompt(tuple(prompt)), max_tokens, sampling=sampling)

    def sequence(self, request: Request) -> list[int]:
        """Return the tokens of a prompt and its answer, which is unknown if there is no `solitary`."""
        return [*_prompt(request), *(self.solitary(request) if self.solitary else [])]

    def submitted(self, request: Request, *, alone: bool = False) -> None:
        answer = self.engine.prepare(request)
        assert self.engine.predicted(answer).wait_s >= 0
        self.requests[self.engine.enqueue(answer, alone=alone)] = Expected(request, is_alone=alone)

    def begin(self, ids: Sequence[int]) -> None:
        assert len(ids) == 1 or not any(expected.is_alone for key, expected in self.requests.items() if key in ids)

    def unfinished(self) -> list[int]:
        return [request_id for request_id, expected in self.requests.items() if expected.last is None]

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 3),
        tenant=st.sampled_from(["", "other"]),
        alone=st.booleans(),
    )
    def submit(self, stem: int, length: int, max_tokens: int, seed: int, tenant: str, alone: bool) -> None:
        prompt = plain_tokens(self.backend, 10 * stem, seed=0) + plain_tokens(self.backend, length, seed=seed + 1)
        self.submitted(structs.replace(self.request(prompt, max_tokens, seed), tenant=tenant), alone=alone)

    @rule(stem=st.integers(0, 2), seed=st.integers(0, 3))
    def submit_a_long_one(self, stem: int, seed: int) -> None:
        """Submit a prompt that fills most of the context, which is more than a sliding window keeps."""
        length = self.backend.info.context_size - 10 * stem - 8
        prompt = plain_tokens(self.backend, 10 * stem, seed=0) + plain_tokens(self.backend, length, seed=seed + 1)
        self.submitted(self.request(prompt, 5, seed))

    @precondition(lambda self: any(expected.last for expected in self.requests.values()))
    @rule(data=st.data(), more=st.integers(1, 20))
    def take_the_next_turn(self, data: st.DataObject, more: int) -> None:
        over = [expected for expected in self.requests.values() if expected.last]
        before = data.draw(st.sampled_from(over))
        prompt = [*_prompt(before.request), *before.tokens, *plain_tokens(self.backend, more, seed=more)]
        if len(prompt) < self.backend.info.context_size:
            self.submitted(self.request(prompt, 5, 0))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            cancelled = [expected for expected in self.requests.values() if expected.is_cancelled]
            self.take(self.engine.step())
            assert all(expected.last for expected in cancelled)

    def take(self, events: list[Event]) -> None:
        for event in events:
            expected = self.requests[event.request_id]
            assert expected.last is None, f"{event} after {expected.last}"
            if isinstance(event, TextDelta):
                expected.tokens += event.tokens
            elif isinstance(event, Finished | Failed):
                expected.last = event
                self.check(expected)

    def check(self, expected: Expected) -> None:
        assert isinstance(expected.last, Finished), expected.last
        assert expected.last.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        if expected.last.reason is FinishReason.CANCELLED:
            assert expected.is_cancelled
        prompt_tokens = len(_prompt(expected.request))
        assert expected.last.context_used == prompt_tokens + len(expected.tokens)
        if expected.last.reason is FinishReason.LENGTH:
            assert expected.request.max_tokens
            room = min(self.backend.info.context_size, self.backend.kv.capacity) - prompt_tokens
            assert len(expected.tokens) == min(expected.request.max_tokens, room)
        if self.solitary:
            assert expected.tokens == self.solitary(expected.request)[: len(expected.tokens)]

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def cancel_one(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.unfinished()))
        self.requests[request_id].is_cancelled = True
        self.engine.cancel(request_id)

    @rule()
    def cancel_everything(self) -> None:
        for request_id in self.unfinished():
            self.requests[request_id].is_cancelled = True
        self.engine.cancel_current()

    @rule()
    def stop_a_pass_for_nobody(self) -> None:
        self.backend.cancel()

    @precondition(lambda self: not self.unfinished())
    @rule(length=st.integers(1, 60), events=st.integers(0, 8), seed=st.integers(0, 3))
    def begin_and_drop(self, length: int, events: int, seed: int) -> None:
        stream: Iterator[Event] = self.engine.generate(self.request(plain_tokens(self.backend, length, seed), 6, seed))
        for _ in range(events):
            next(stream, None)
        stream.close()  # type: ignore[attr-defined]
        assert self.engine.idle

    @invariant()
    def the_books_agree(self) -> None:
        assert_books_agree(self.engine)
        assert self.engine.idle == (not self.unfinished())
        status = self.engine.status()
        assert status.preemptions == 0 or self.options.get("overcommit")
        assert status.generated_tokens >= self.generated_tokens
        self.generated_tokens = status.generated_tokens

    def teardown(self) -> None:
        for _ in range(2000):
            if self.engine.idle:
                break
            self.take(self.engine.step())
        assert not self.unfinished()
        self.the_books_agree()


def _prompt(request: Request) -> list[int]:
    assert isinstance(request.prompt, TokenPrompt)
    return list(request.prompt.tokens)


def run_engine_machine(
    backend: Backend,
    *,
    alone: Backend | None,
    examples: int,
    propose: Propose | None,
    steps: int = 30,
    **options: Any,
) -> None:
    """Run many random operations on the engine over `backend`.

    `alone` is the same model with room for one sequence, or None if answers may depend on other requests.
    `examples` is the number of runs at night; other tiers have fewer. `propose` makes drafts; None runs without drafts.
    `options` are those of Engine.
    """
    known: dict[tuple[Any, ...], list[int]] = {}

    def solitary(request: Request) -> list[int]:
        assert alone is not None
        key = (tuple(_prompt(request)), request.max_tokens, request.sampling.seed)
        if key not in known:
            forget_all(alone)
            known[key] = answer_all(Engine(alone), [request])[0].tokens
        return known[key]

    run_state_machine_as_test(
        lambda: Machine(backend, None if alone is None else solitary, propose, options),  # type: ignore[arg-type]
        settings=hypothesis.settings(
            max_examples=tiers.examples(examples),
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
