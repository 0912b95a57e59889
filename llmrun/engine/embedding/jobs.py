"""The jobs of an Embedder, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.base.errors import LlmrunError


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """The texts of one call, and what is wanted of them.

    texts       the tokens of each text
    on_done     called with the job once it has all of its results or an error
    dimensions  the number of features to keep, or None for all
    normalize   whether vectors have length 1
    tenant      whose job it is
    results     float32[features] for each text, in order; scores are float32[1]
    error       why the job failed, or None
    """

    texts: Sequence[Sequence[int]]
    on_done: Callable[[EmbeddingJob], None]
    dimensions: int | None = None
    normalize: bool = True
    tenant: str = ""
    results: list[NDArray[np.float32]] = field(default_factory=list)
    error: LlmrunError | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class Turns:
    """The jobs that are not done. Their tenants take turns, and so do the jobs of a tenant. Thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, deque[EmbeddingJob]] = {}  # only those with jobs; the first one is next
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __contains__(self, job: EmbeddingJob) -> bool:
        return job in self._tenants.get(job.tenant, ())

    def add(self, job: EmbeddingJob) -> None:
        with self._lock:
            self._tenants.setdefault(job.tenant, deque()).append(job)

    def remove(self, job: EmbeddingJob) -> None:
        """Remove a job. Unknown jobs are ignored."""
        with self._lock:
            jobs = self._tenants.get(job.tenant, deque())
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self._tenants.pop(job.tenant, None)

    def next_texts(self) -> Iterator[tuple[EmbeddingJob, int]]:
        """Yield the jobs and numbers of all texts without results, in the order in which they should run.

        Afterwards, another tenant and another job of this tenant are first.
        """
        with self._lock:
            queues = [deque((job, len(job.results)) for job in jobs) for jobs in self._tenants.values()]
            if queues:
                tenant = next(iter(self._tenants))
                jobs = self._tenants[tenant] = self._tenants.pop(tenant)
                jobs.rotate(-1)
        while queues:
            for queue in queues:
                job, number = queue.popleft()
                yield job, number
                if number + 1 < len(job.texts):
                    queue.append((job, number + 1))
            queues = [queue for queue in queues if queue]
