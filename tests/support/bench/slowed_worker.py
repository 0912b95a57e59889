"""A benchmark worker whose engine is slowed down: `slowed_worker 1.05`.

It waits in a busy loop, because a sleep of microseconds takes much longer than requested.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from llmrun.backends import registry
from llmrun.jobs.bench.measuring import worker


class Slowed:
    """A backend whose every pass takes `factor` times as long."""

    def __init__(self, backend: Any, factor: float) -> None:
        self._backend, self._factor = backend, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: Any) -> Any:
        started = time.perf_counter()
        outputs = self._backend.forward(batch)
        until = started + self._factor * (time.perf_counter() - started)
        while time.perf_counter() < until:
            continue
        return outputs


def main() -> None:
    factor = float(sys.argv[1])
    opened = registry.open_backend

    def open_slowed(*arguments: Any, **options: Any) -> Any:
        return Slowed(opened(*arguments, **options), factor)

    registry.open_backend = open_slowed
    worker.main()


if __name__ == "__main__":
    main()
