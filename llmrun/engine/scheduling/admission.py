"""The queue of requests and the slots of running requests: decides which requests run, wait or make room."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from llmrun.base.errors import ContextExceeded
from llmrun.base.types import FinishReason
from llmrun.engine.base import EngineStatus
from llmrun.engine.requests import Event
from llmrun.engine.scheduling.fairness import FairShares
from llmrun.engine.scheduling.scheduler import Room, is_over, wait_for_prefix
from llmrun.engine.scheduling.waits import Outlook, Prediction
from llmrun.engine.slots import Neighbours, SequenceSlots, Slot

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.answer import Answer
    from llmrun.engine.scheduling.scheduler import Scheduler, Speculation, Work


class Admission(Neighbours):
    """The waiting and the running requests of an engine.

    A request is admitted if all running requests can then finish (scheduler.py). With `overcommit`, the cache needs
    room only for the prompt. If the cache becomes full, the newest request returns to the queue and is computed again.

    images_s  as in Outlook
    waiting  requests without a slot
    running  requests with a slot, in order of admission
    preemptions  how often a running request had to return to the queue
    """

    def __init__(
        self,
        kv: KVCache,
        slots: SequenceSlots,
        speculation: Speculation,
        scheduler: Scheduler,
        *,
        max_running: int,
        overcommit: bool,
        images_s: Callable[[Answer, int], Mapping[Hashable, float]] = lambda answer, depth: {},
    ) -> None:
        super().__init__(kv)
        self._slots = slots
        self._speculation = speculation
        self._scheduler = scheduler
        self._shares = FairShares()
        self._ordering = Lock()  # other threads predict waits
        self._outlook = Outlook(kv, scheduler, slots, max_running, images_s)
        self._max_running = max_running
        self._overcommit = overcommit
        # True after a request has found no room, paused or made room, and until a request ends.
        self._is_paused = False
        self._is_held_up = False  # True while texts to embed wait for room
        self.waiting: deque[Answer] = deque()
        self.running: dict[Answer, Slot] = {}
        self.preemptions = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0  # totals of admitted requests

    def admit(self) -> None:
        """Assign slots to waiting requests in a fair order, except requests that wait for the computation of a prefix.

        If there is no room for a request, all requests behind it wait, too. Otherwise, short requests could overtake
        long ones forever. Likewise, no request is admitted while later requests hold up an earlier one.
        """
        if self._is_paused or self._is_held_up or not self.waiting or not self._n_free_slots:
            return
        if self._later_ones_hold_up:
            self._is_paused = True
            return
        for answer in self._order(list(self.waiting)):
            if not self._n_free_slots:
                return
            if answer.wait is None or is_over(answer.wait, self.running):
                answer.wait = wait_for_prefix(
                    answer, self.running, self._slots.cached(answer.reusable, answer.prefix_scope, answer.saved)
                )
            if answer.wait is not None:
                answer.has_waited = True
                continue
            slot = self._slots.acquire(answer.reusable, answer.prefix_scope, answer.saved)
            self.running[answer] = slot
            if not self._has_room(answer, slot):
                self._slots.give_back(self.running.pop(answer))
                self._is_paused = True
                return
            self.waiting.remove(answer)
            slot.owner = answer.request_id
            with self._ordering:
                self._shares.admit(answer.tenant, len(answer.tokens) - len(slot.tokens))
            if answer.cached_tokens is None:
                answer.cached_tokens = len(slot.tokens)
                answer.found_tokens = slot.found
                self._prompt_tokens += answer.prompt_tokens
                self._cached_tokens += answer.cached_tokens

    def queue(self, answer: Answer) -> None:
        """Add a request to the queue. Thread-safe."""
        self._outlook.successors.arrived()
        self.waiting.append(answer)

    def charge(self, answer: Answer, tokens: int) -> None:
        """Charge a request's tenant for generated tokens."""
        with self._ordering:
            self._shares.charge(answer.tenant, tokens)

    def rows_beside_answers(self) -> int:
        return self._scheduler.rows_beside_answers(self.running)

    def spare_blocks(self) -> int:
        if not self.running:
            return super().spare_blocks()
        running = self.running.items()
        return self._free_blocks - sum(self._kv.needed(slot.index, answer.most_rows) for answer, slot in running)

    def hold_up(self, held: bool) -> None:
        self._is_held_up = held

    def predicted(
        self, new: Answer, leaving: Collection[int] = (), step: tuple[list[Work], float] | None = None
    ) -> Prediction:
        """Return when a new request is admitted and when its first token arrives, if it is queued now. Thread-safe.

        leaving  the ids of requests that will end before the next step
        step     the work of the step that is running and the seconds since its beginning, or None
        """
        waiting = [answer for answer in list(self.waiting) if answer.request_id not in leaving]
        running = [(answer, slot) for answer, slot in list(self.running.items()) if answer.request_id not in leaving]
        order = self._order([*waiting, new])
        return self._outlook.of(new, order[: order.index(new)], dict(running), step)

    def left(self, step: tuple[list[Work], float]) -> dict[int, float]:
        """Return the seconds until the first token of each running prompt, by the request's id. Thread-safe."""
        return self._outlook.left(self._order(list(self.waiting)), dict(list(self.running.items())), step)

    def status(self) -> EngineStatus:
        """Return the state of the queue and of the cache, and the token counts so far."""
        return EngineStatus(
            running=len(self.running),
            waiting=len(self.waiting),
            free_tokens=max(0, self._free_blocks) * self._kv.block_size,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens
            + sum(answer.generated_tokens for answer in [*self.waiting, *self.running]),  # preempted requests wait
            preemptions=self.preemptions,
        )

    def room(self) -> Room:
        """Return the room in the KV cache for the next step."""
        if self._overcommit:
            return Room(self._kv, {}, 0)
        return Room(self._kv, self.running, self._free_blocks)

    def make_room(self) -> list[Event]:
        """Free space in a full KV cache.

        If there is an idle slot with a cached prefix, that prefix is dropped. Otherwise, the newest request returns to
        the queue or, if only one request is running, that request ends. After a request has returned to the queue, no
        request is admitted until a running one has ended, because two requests could otherwise evict each other
        forever.
        """
        if self._slots.forget_oldest_idle():
            return []
        answer, slot = next(reversed(self.running.items()))
        if len(self.running) > 1:
            del self.running[answer]
            self._speculation.release(answer)
            self._slots.forget(slot)
            self.waiting.appendleft(answer)
            self._is_paused = True
            self.preemptions += 1
            return []
        if answer.in_prefill:
            error = ContextExceeded(
                f"prompt does not fit in the KV cache: {answer.prompt_tokens:,} tokens, but the "
                f"cache is full after {len(slot.tokens):,}",
                hint="shorten the prompt",
            )
            events: list[Event] = [answer.fail(error)]
        else:
            events = answer.finish(FinishReason.LENGTH)
        self.retire()
        return events

    def end_cancelled(self, named: Collection[int], last_cancel: int) -> list[Event]:
        """End the requests with these ids, and all requests that were submitted before the last `cancel_current`."""
        events: list[Event] = []
        for answer in [*self.waiting, *self.running]:
            if answer.request_id in named or answer.last_cancel != last_cancel:
                events += answer.finish(FinishReason.CANCELLED)
        self.retire()
        return events

    def retire(self) -> None:
        """Remove finished requests. The tokens in their slots stay cached for later requests."""
        for answer in [answer for answer in self.running if answer.over]:
            self._speculation.finish(answer)
            self._generated_tokens += answer.generated_tokens
            self._outlook.observe(answer)
            slot = self.running.pop(answer)
            answer.computed_tokens = len(slot.tokens)
            answer.forget_files()
            if answer.in_prefill:  # the tenant does not pay for the part of the prompt that was not processed
                self.charge(answer, len(slot.tokens) - answer.prompt_tokens)
            self._slots.release(slot)
            self._is_paused = False
        for answer in [answer for answer in list(self.waiting) if answer.over]:  # a copy, because the list grows
            self._generated_tokens += answer.generated_tokens
            answer.computed_tokens = 0
            answer.forget_files()
            self.waiting.remove(answer)
            self._is_paused = False

    def drop_all(self) -> None:
        """Forget all requests without returning any events."""
        self.waiting.clear()
        while self.running:
            answer, slot = self.running.popitem()
            self._speculation.release(answer)
            self._slots.release(slot)
        self._is_paused = False

    def drop_failed(self, work: Sequence[Work]) -> None:
        """Drop the requests of a failed pass and empty their slots, whose state in the cache is unknown."""
        for part in work:
            del self.running[part.answer]
            self._speculation.release(part.answer)
        self._is_paused = False
        for part in work:
            self._slots.forget(part.slot)

    def _order(self, requests: list[Answer]) -> list[Answer]:
        with self._ordering:
            return self._shares.order(requests, time.perf_counter(), self._scheduler.costs.row_seconds)

    @property
    def _n_free_slots(self) -> int:
        # Paused requests run no rows, so other requests run instead. Otherwise, a few long answers that wait for each
        # other's memory would keep out short answers, for which there is room.
        n_active = sum(answer.paused_at is None for answer in self.running)
        return max(0, min(self._max_running - n_active, self._slots.n_idle))

    @property
    def _free_blocks(self) -> int:
        """The number of blocks that no running request holds."""
        return self._kv.free_blocks + self._slots.idle_blocks

    @property
    def _later_ones_hold_up(self) -> bool:
        """True if a paused request could continue without the requests that were admitted after it."""
        running = list(self.running.items())
        for index, (answer, slot) in enumerate(running):
            if answer.paused_at is not None:
                free = self._free_blocks + self._kv.held([later.index for _, later in running[index + 1 :]])
                if Room(self._kv, dict(running[: index + 1]), free).take(answer, slot, answer.paused_at):
                    return True
        return False

    def _has_room(self, answer: Answer, slot: Slot) -> bool:
        if len(self.running) == 1:
            return True
        if self._overcommit:
            return self._kv.needed(slot.index, answer.prompt_tokens + 1) <= self._free_blocks
        return self.room().suffices
