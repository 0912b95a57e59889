"""Chooses the tokens that each running request runs in the next step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmrun.engine.sharing import rows_until_copy
from llmrun.engine.work import Work

if TYPE_CHECKING:
    from llmrun.engine.answer import Answer
    from llmrun.engine.room import Room
    from llmrun.engine.slots import Slot
    from llmrun.engine.speculation import Speculation


def pick_rows(
    running: Mapping[Answer, Slot],
    waiting: Sequence[Answer],
    rows_per_step: int,
    speculation: Speculation,
    room: Room,
) -> list[Work]:
    """Choose the next tokens of each running request: those of an answer and a draft, or a chunk of a prompt.

    Steps with prompts have no drafts, because additional rows are not cheap in large steps. A request pauses if its
    tokens would take the room that others need to finish.
    """
    alone = next((answer for answer in running if answer.runs_alone), None)
    if alone is not None:
        running = {alone: running[alone]}
    work: list[Work] = []
    prompts: list[tuple[Answer, Slot]] = []
    most = max(rows_per_step // max(len(running), 1), 1)
    for answer, slot in running.items():
        if len(answer.tokens) - len(slot.tokens) > 1:
            prompts.append((answer, slot))
            continue
        part = Work.next_of(answer, slot, most)
        if room.take(answer, slot, part.depth + part.rows):
            work.append(part)
    left = max(rows_per_step - sum(part.rows for part in work), 1)
    if not prompts and room.is_ample:
        work = speculation.with_drafts(work, left)
    for answer, slot in prompts:
        if left > 0:
            part = Work.next_of(answer, slot, min(left, rows_until_copy(answer, slot, waiting)))
            if room.take(answer, slot, part.depth + part.rows):
                work.append(part)
                left -= part.rows
    return work


def begun_by(work: Sequence[Work]) -> list[int]:
    """Note the start of requests that run for the first time in this step, and return their ids."""
    new = [part.answer for part in work if part.answer.prefill_started is None]
    for answer in new:
        answer.prefill_started = time.perf_counter()
        answer.runs_alone = False
    return [answer.request_id for answer in new]
