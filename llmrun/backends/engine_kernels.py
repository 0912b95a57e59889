"""The kernels that the engine uses with every backend.

They are named here so that a backend can load them in the same call as its own kernels. A first run then compiles all
kernels in parallel.
"""

from __future__ import annotations

from llmrun.base.compiled.store import KernelName

SAMPLE = KernelName.of("sampling.chain", "sample")
ENGINE_KERNELS = (SAMPLE,)
