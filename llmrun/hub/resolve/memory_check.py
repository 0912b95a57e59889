"""Checks before a download whether a model fits into this machine's memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import DoesNotFit
from llmrun.base.machine import memory as memory_module
from llmrun.hub.catalog import Wanted
from llmrun.hub.names import Artifact, HubSource, PypiSource

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.fitting import Fit
    from llmrun.hub.catalog import CatalogEntry
    from llmrun.hub.progress_reporter import Reporter

_UNPACKED = re.compile(r"(UD-)?(IQ[123]|TQ)")  # our engine unpacks these types to one byte per weight
_LARGER_IN_MEMORY = 1.05  # packed weights are up to 2 % larger than the file, and catalogue sizes are rounded
_SURELY_FITS = 0.5  # a file smaller than this fraction of memory certainly fits, so its header is not requested

# The size of the KV cache (4,096 tokens in f16) plus scratch memory, as a function of the weight count in billions.
# The estimate is higher than the actual size for SmolLM2 135M (0.12 GB), Qwen3 0.6B (0.5 GB), 4B (0.6 GB), 8B (0.6 GB)
# and 32B (1.1 GB), and Llama 70B (1.4 GB).
_CACHE_OF_A_BILLION = 0.55e9  # bytes
_CACHE_GROWTH = 0.3


def require_memory(artifact: Artifact, wanted: Wanted, reporter: Reporter, options: OpenOptions | None = None) -> None:
    """Raise DoesNotFit if a model needs more than this machine's total memory.

    The message lists the memory requirements, and the hint names a quantization that fits, or the command that finds
    one. Memory used by other programs counts as available, and so does the memory of the RPC servers in `options`. If
    the file size alone is not conclusive, this function fetches the model's header and may raise the same errors as
    `read_header`.
    """
    memory = memory_module.whole_memory()
    if memory is None or surely_fits(artifact.size, memory) or isinstance(artifact.source, PypiSource):
        return
    from llmrun.backends.fitting import Resources, fit_of
    from llmrun.hub.remote.model_headers import read_header

    machine = Resources(memory, Resources.of_this_machine(options=options).gpus)
    with read_header(artifact) as file:
        found = fit_of(file, machine)
        if not found.fits:
            choice = _smaller(artifact, wanted, memory - (found.needed - found.footprint.weights))
            raise DoesNotFit(
                _sentence(artifact.name, found), hint=f"{choice}; to download it anyway, use `llmrun pull --anyway`"
            )
    if not found.in_memory:
        reporter.note(
            f"{artifact.name}: needs {format_bytes(found.needed)} of memory, but this machine has only "
            f"{format_bytes(memory)}; generation will be slow because each token reads the rest from disk"
        )


def surely_fits(size: int, memory: int) -> bool:
    """Return whether a model file of this size fits into memory with its KV cache, for any possible header."""
    return size <= _SURELY_FITS * memory


def smaller_choice(entry: CatalogEntry, most_bytes: int) -> str:
    """Return the name of the largest quantization whose weights take up at most `most_bytes` bytes of memory.

    The estimate uses the sizes in the catalogue. Returns "" if no quantization fits or no size is known.
    """
    fitting = {
        quant.name: size
        for quant in entry.quants.values()
        if not _UNPACKED.match(quant.name)
        and (size := quant.estimated_size) is not None
        and _LARGER_IN_MEMORY * size <= most_bytes
    }
    best = max(fitting, key=lambda name: fitting[name], default=None)
    return entry.name_with(best) if best is not None else ""


def estimated_need(file_bytes: int, weights: float | None) -> int:
    """Estimate how many bytes of memory a model uses with 4,096 tokens of context, without reading its header.

    The estimate assumes grouped-query attention. The estimate for the KV cache and scratch memory is high on purpose:
    0.8 GB for 4 billion weights, 1.2 GB for 14 billion. `llmrun fit` computes the exact number from the header.

    weights  the number of weights in the model; None if unknown
    """
    billions = (weights if weights is not None else 2 * file_bytes) / 1e9
    beyond_weights: float = _CACHE_OF_A_BILLION * billions**_CACHE_GROWTH
    return round(_LARGER_IN_MEMORY * file_bytes + beyond_weights)


def _sentence(name: str, found: Fit) -> str:
    assert found.memory is not None
    sizes = found.footprint
    needed, weights, cache, rest, memory = map(
        format_bytes,
        (
            found.needed,
            sizes.weights,
            sizes.cache.of(found.context),
            sizes.scratch + sizes.vocabulary,
            found.memory,
        ),
    )
    return (
        f"{name}: needs {needed} of memory (weights {weights}, KV cache of {found.context:,} tokens {cache}, "
        f"scratch {rest}), but this machine has {memory}"
    )


def _smaller(artifact: Artifact, wanted: Wanted, most_bytes: int) -> str:
    """Return advice on how to find a model whose weights take up at most `most_bytes` bytes of memory."""
    if wanted.entry is not None and (smaller := smaller_choice(wanted.entry, most_bytes)):
        return f"the largest that fits is {smaller}"
    if isinstance(artifact.source, HubSource):
        return f"`llmrun fit hf:{artifact.source.repository}` shows which quantizations fit"
    return "choose a smaller model"
