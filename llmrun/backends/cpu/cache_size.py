"""Computes how much memory a model needs on the CPU, and chooses the sizes of its context and KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from llmrun.backends.base import AUTO, CHECKPOINT_DISTANCE, ROWS_PER_ANSWER
from llmrun.backends.cpu.lower import scratch_needed
from llmrun.backends.cpu.lowering import kv_position_bytes
from llmrun.backends.cpu.paged_kv import blocks_in, blocks_of_sequence, blocks_of_window
from llmrun.backends.cpu.recurrent_states import (
    checkpoint_bytes,
    n_checkpoints,
    state_bytes,
)
from llmrun.backends.cpu.weights import packed_bytes
from llmrun.backends.sizing import (
    ENGINE_PROCESS,
    LARGEST_DEFAULT,
    Footprint,
    KVBytes,
    MemoryNeeds,
    check_cache_fits,
    context_for,
    header_bytes,
    rows_in_one_step,
    shared_cache_tokens,
    vocabulary_bytes,
)
from llmrun.base.errors import UsageError
from llmrun.base.machine.memory import free_memory
from llmrun.base.types import named_pooling
from llmrun.formats.layouts.kv import BLOCK, F16, Q8_0
from llmrun.model.archs.parts.encoders import is_encoder
from llmrun.model.archs.parts.tensors import is_quantized, parameter_count

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.cpu.vision_costs import EncoderMemory
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.vision.layout import Projector


def kv_type_of(file: GGUFFile, options: OpenOptions) -> str:
    """Return the type of the KV cache: the requested type, or else the default for the model.

    Quantized weights change the predictions of a model far more than q8_0 does (docs/kv-cache.md). Embedding models and
    rerankers keep f16, because embeddings are stored and compared with embeddings of other programs.
    """
    if options.kv_type is not None:
        return options.kv_type
    embeds = is_encoder(file) or named_pooling(file.metadata, file.string("general.architecture")) is not None
    return (Q8_0 if is_quantized(file) and not embeds else F16).name


def footprint_on_cpu(
    file: GGUFFile,
    plan: Plan,
    head: Plan | None = None,
    *,
    max_sequences: int,
    context_size: int,
    kv_type: str,
    max_rows: int,
    n_threads: int,
    encoder: EncoderMemory | None = None,
) -> Footprint:
    """Return the footprint of a model. `plan` and the draft head's plan must be built from `file`.

    context_size  the context for which the partial results of attention are counted as scratch memory
    encoder       the memory for encoding images, or None if the model reads no images
    """
    plans = [plan] if head is None else [plan, head]
    layers = [
        (window and BLOCK * blocks_of_window(window, max_rows), max_sequences * group.layers * position_bytes)
        for part in plans
        for group in part.groups
        for window, position_bytes in [(group.shape.window, kv_position_bytes(group.shape, kv_type))]
    ]
    states, checkpoints = _recurrent_bytes(plan, max_sequences)
    width = 0 if plan.logits is None else plan.logits.width
    logits = width * np.dtype(np.float32).itemsize * min(max_rows, max_sequences * ROWS_PER_ANSWER)
    return Footprint(
        weights=packed_bytes(plan.matrices if head is None else plan.matrices_with(head))
        + (0 if encoder is None else encoder.weights),
        cache=KVBytes.of_layers([*layers, checkpoints], states),
        scratch=logits
        + (0 if encoder is None else encoder.scratch)
        + sum(
            scratch_needed(
                part,
                [*_whole_blocks(part, max_sequences, context_size, max_rows).values()],
                kv_type=kv_type,
                max_rows=max_rows,
                n_threads=n_threads,
            )
            for part in plans
        ),
        vocabulary=vocabulary_bytes(file),
        header=header_bytes(file),
        programs=ENGINE_PROCESS,
        kv_type=kv_type,
    )


def _whole_blocks(plan: Plan, max_sequences: int, context_size: int, max_rows: int) -> dict[int, int]:
    """Return the number of cache blocks for each window if every sequence has a whole context."""
    return {window: max_sequences * blocks_of_sequence(window, context_size, max_rows) for window in plan.windows}


def _recurrent_bytes(plan: Plan, max_sequences: int) -> tuple[int, tuple[int, int]]:
    """Return (bytes of recurrent states, size of checkpoints as an entry of KVBytes.windows).

    Each sequence has a checkpoint near the end of its prompt, which is counted with the states. The size of the other
    checkpoints, which are made at regular intervals until their memory is full, grows with the context like a window.
    """
    each = checkpoint_bytes(plan.states)
    others = max(0, n_checkpoints(plan.states, max_sequences) // max_sequences - 1)
    states = max_sequences * (state_bytes(plan.states) + each)
    return states, (CHECKPOINT_DISTANCE * others, max_sequences * each // CHECKPOINT_DISTANCE)


# The maximum number of rows in a step. Larger steps would not prefill faster, because with this many rows most weights
# are already read from the CPU caches. Larger steps would also delay progress reports, which are sent between steps.
MAX_ROWS = 256
# The maximum number of rows in a step without a causal mask, unless a larger context was requested.
_MOST_ROWS_AT_ONCE = 8192


def rows_of_step(plan: Plan, train_context: int, asked_context: int | None, projector: Projector | None = None) -> int:
    """Return the maximum number of rows in a step.

    Without a causal mask, all rows of a sequence are in one step, so a step must have room for a whole context. Rows of
    an image that attend to each other are in one step, too.
    """
    if plan.is_causal:
        return max(MAX_ROWS, rows_in_one_step(projector))
    return max(MAX_ROWS, min(asked_context or _MOST_ROWS_AT_ONCE, train_context))


def cache_size(
    file: GGUFFile,
    plan: Plan,
    head: Plan | None,
    options: OpenOptions,
    train_context: int,
    n_threads: int,
    projector: Projector | None = None,
    encoder: EncoderMemory | None = None,
) -> tuple[int, list[int]]:
    """Return the context size in tokens, and the number of cache blocks for each window.

    head       the plan of the draft head, or None if there is no draft head
    projector  the projector, or None if the model reads no images
    encoder    the memory for encoding images, which must not be in use yet, or None if another program encodes images

    Raises DoesNotFit, and UsageError if the cache is smaller than the context.
    """
    max_rows = rows_of_step(plan, train_context, options.context_size, projector)
    free, parameters = free_memory(reserved=options.reserved_memory), parameter_count(file)
    kv_type = kv_type_of(file, options)

    def needs(max_sequences: int) -> MemoryNeeds:
        footprint = footprint_on_cpu(
            file,
            plan,
            head,
            max_sequences=max_sequences,
            context_size=BLOCK,  # the context is not known yet, and partial results of attention take little memory
            kv_type=kv_type,
            max_rows=max_rows,
            n_threads=n_threads,
            encoder=encoder,
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
        path=path,
    )
    full = _whole_blocks(plan, options.max_sequences, context_size, max_rows)
    if asked is not None and 0 in full:  # sequences never share the blocks of a sliding window
        many = needs(options.max_sequences)
        if asked == AUTO:
            full[0] = min(full[0], blocks_in(shared_cache_tokens(context_size, options.max_sequences, many)))
        else:
            # In layers without a window, a token has the same size in the shared cache for any number of sequences.
            cache = replace(many.footprint.cache, token=needs(1).footprint.cache.token)
            shared = replace(many, footprint=replace(many.footprint, cache=cache))
            check_cache_fits(int(asked), shared, path, flag="--kv-tokens")
            full[0] = blocks_in(int(asked))
    return context_size, list(full.values())
