"""Decides how large the context and the KV cache of a model are on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.backends.base import AUTO
from llmrun.backends.cpu.footprint import footprint_on_cpu
from llmrun.backends.cpu.kv_pool import blocks_in, blocks_of_sequence
from llmrun.backends.sizing.context_size import (
    LARGEST_DEFAULT,
    MemoryNeeds,
    check_cache_fits,
    context_for,
    shared_cache_tokens,
)
from llmrun.base.errors import UsageError
from llmrun.base.machine.free_memory import free_memory
from llmrun.model.archs.parts.tensors import parameter_count

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

# The maximum number of rows in a step. Larger steps would not prefill faster, because with this many rows most weights
# are already read from the CPU caches. They would also delay progress reports, which are sent between steps.
MAX_ROWS = 256
# The most rows of a step without a causal mask, unless a larger context was asked for.
_MOST_ROWS_AT_ONCE = 8192


def rows_of_step(plan: Plan, train_context: int, asked_context: int | None) -> int:
    """Return the maximum number of rows in a step.

    Without a causal mask, a step must have room for all rows of a sequence, which is then as long as the context.
    """
    if plan.is_causal:
        return MAX_ROWS
    return max(MAX_ROWS, min(asked_context or _MOST_ROWS_AT_ONCE, train_context))


def cache_size(
    file: GGUFFile, plan: Plan, head: Plan | None, options: OpenOptions, train_context: int, n_threads: int
) -> tuple[int, list[int]]:
    """Return the context size in tokens and the number of cache blocks for each window.

    head  the plan of the draft head, or None without one

    Raises DoesNotFit, and UsageError if the cache is smaller than the context.
    """
    max_rows = rows_of_step(plan, train_context, options.context_size)
    free, parameters = free_memory(reserved=options.reserved_memory), parameter_count(file)

    def needs(max_sequences: int) -> MemoryNeeds:
        footprint = footprint_on_cpu(
            *(file, plan, head),
            max_sequences=max_sequences,
            kv_type=options.kv_type,
            max_rows=max_rows,
            n_threads=n_threads,
        )
        return MemoryNeeds(footprint, free, parameters)

    asked, path = options.kv_tokens, str(file.path)
    if isinstance(asked, int) and asked < (options.context_size or 1):
        raise UsageError(f"the KV cache of {asked:,} tokens is smaller than the context of {options.context_size:,}")
    if options.context_size and options.context_size > max_rows and not plan.is_causal:
        raise UsageError(f"the model has only {max_rows:,} positions, fewer than a context of {options.context_size:,}")
    largest_default = LARGEST_DEFAULT if plan.is_causal else max_rows
    context_size = context_for(
        options.context_size,
        train_context=train_context,
        largest_default=min(largest_default, asked) if isinstance(asked, int) else largest_default,
        needs=needs(options.max_sequences if asked is None else 1),
        kv_type=options.kv_type,
        path=path,
    )
    full = {
        window: options.max_sequences * blocks_of_sequence(window, context_size, max_rows) for window in plan.windows
    }
    if asked is not None and 0 in full:  # sequences never share the blocks of a sliding window
        many = needs(options.max_sequences)
        if asked == AUTO:
            full[0] = min(full[0], blocks_in(shared_cache_tokens(context_size, options.max_sequences, many)))
        else:
            # One sequence's share of the layers without a window is a token's size in the shared cache.
            cache = replace(many.footprint.cache, token=needs(1).footprint.cache.token)
            shared = replace(many, footprint=replace(many.footprint, cache=cache))
            check_cache_fits(int(asked), shared, options.kv_type, path, flag="--kv-tokens")
            full[0] = blocks_in(int(asked))
    return context_size, list(full.values())
