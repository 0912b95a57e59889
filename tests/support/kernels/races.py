"""Find data races in a lowered plan from what its records read and write, and from its barriers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmrun.backends.cpu.lowering import Lowered
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.formats.quants.weight_type import GROUP_ROWS
from llmrun.model.plan.ops.activations import GatedWords, XieluWords
from llmrun.model.plan.ops.adapters import LowRankWords
from llmrun.model.plan.ops.attention import AttentionWords, MergeWords
from llmrun.model.plan.ops.convolution import CausalConvolutionWords, ConvolutionWords
from llmrun.model.plan.ops.embedding import EmbedWords, ImageWords
from llmrun.model.plan.ops.experts import CombineWords, ExpertBiasWords, GroupWords, RouteWords
from llmrun.model.plan.ops.linear import FloatWords, IntegerWords, QuantizeWords
from llmrun.model.plan.ops.norms import CutOffWords, MatchLengthWords, NormWords
from llmrun.model.plan.ops.recurrences import RecurrenceWords
from llmrun.model.plan.ops.rope import RopeWords
from llmrun.model.plan.ops.rows import AddWords, ClampWords, ConcatWords, SoftCapWords


@dataclass(frozen=True)
class Uses:
    """The words of a kernel's op record that are addresses, by name.

    second, third, fourth, fifth  inputs after the op's first, which have their own flags
    cache          an address in the KV cache or the recurrent states, which all threads share
    tables         routing tables, private to each thread in a step of one row
    """

    words: type[Any]  # a NamedTuple
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    second: str = ""
    third: str = ""
    fourth: str = ""
    fifth: str = ""
    cache: str = ""
    tables: tuple[str, ...] = ()

    def flag(self, word: str) -> int:
        """Return the flag that marks this input as private."""
        later = {
            self.second: records.FLAG_PRIVATE_SECOND,
            self.third: records.FLAG_PRIVATE_THIRD,
            self.fourth: records.FLAG_PRIVATE_FOURTH,
            self.fifth: records.FLAG_PRIVATE_FIFTH,
        }
        return later.get(word, records.FLAG_PRIVATE_INPUT)


_NORM = Uses(NormWords, ("x",), ("out",))
_ATTENTION = Uses(AttentionWords, ("q", "cache"), ("out", "partials"), cache="cache")
_RECURRENCE = Uses(
    RecurrenceWords,
    ("q", "k", "v", "gate", "beta", "state"),
    ("out", "state"),
    "k",
    "v",
    "gate",
    "beta",
    cache="state",
)
_EXPERT_TABLES = ("tables", "row_numbers")
USES = {
    "embed": Uses(EmbedWords, ("table",), ("out",)),
    "place_images": Uses(ImageWords, (), ("out",)),
    "add_images": Uses(ImageWords, ("out",), ("out",)),
    "rmsnorm": _NORM,
    "match_length": Uses(MatchLengthWords, ("x", "like"), ("out",), second="like"),
    "cut_off": Uses(CutOffWords, ("x",), ("out",)),
    "layernorm": _NORM,
    "quantize": Uses(QuantizeWords, ("x",), ("out",)),
    "linear.int8": Uses(IntegerWords, ("x",), ("out",)),
    "linear.floats": Uses(FloatWords, ("x",), ("out",)),
    "reduce": Uses(LowRankWords, ("x",), ("out",)),
    "look_up": Uses(LowRankWords, (), ("out",)),
    "expand": Uses(LowRankWords, ("x", "out"), ("out",)),
    "rope_store": Uses(RopeWords, ("q", "k", "v"), ("out", "cache"), second="k", third="v", cache="cache"),
    "rotate": Uses(RopeWords, ("q",), ("out",)),
    "attention": _ATTENTION,
    "capped_attention": _ATTENTION,
    "merge": Uses(MergeWords, ("partials",), ("out",)),
    "gated": Uses(GatedWords, ("gate", "up"), ("out",), second="up"),
    "xielu": Uses(XieluWords, ("x",), ("out",)),
    "clamp": Uses(ClampWords, ("x",), ("out",)),
    "add": Uses(AddWords, ("x", "y", "gate"), ("out",), second="y", third="gate"),
    "concat": Uses(ConcatWords, ("a", "b"), ("out",), second="b"),
    "keep": Uses(ConvolutionWords, ("x",), ("cache",), cache="cache"),
    "convolve": Uses(ConvolutionWords, ("x", "cache"), ("out",), cache="cache"),
    "causal_convolution": Uses(
        CausalConvolutionWords, ("x", "state"), ("out", "second_out", "third_out", "state"), cache="state"
    ),
    "delta_rule": _RECURRENCE,
    "ssd": _RECURRENCE,
    "selective_scan": _RECURRENCE,
    "soft_cap": Uses(SoftCapWords, (), ()),  # writes the logits only
    "route": Uses(RouteWords, ("logits",), ("chosen", "weights")),
    "group": Uses(GroupWords, ("chosen",), ("head", "slots", "sources", "experts"), tables=("chosen",)),
    "experts.int8": Uses(IntegerWords, ("x", *_EXPERT_TABLES), ("out",), tables=_EXPERT_TABLES),
    "experts.floats": Uses(FloatWords, ("x", *_EXPERT_TABLES), ("out",), tables=_EXPERT_TABLES),
    "bias": Uses(ExpertBiasWords, ("x", "experts"), ("out",), tables=("experts",)),
    "combine": Uses(CombineWords, ("y", "slots", "weights", "out"), ("out",), tables=("slots", "weights")),
}
GROUP_BYTES = 4 * GROUP_ROWS


@dataclass(frozen=True)
class Access:
    """One record's access to one buffer, at `offset` bytes from its start at `address`."""

    record: int
    address: int
    offset: int
    writes: bool
    private: bool  # in a step of one row, each thread has its own copy
    replicated: bool  # every thread writes the same bytes


def accesses(lowered: Lowered) -> Iterator[list[Access]]:
    """Yield the accesses of each record, in order."""
    for index, name in enumerate(lowered.kernels):
        kernel = USES[_key(name)]
        flags = int(lowered.records[index, records.OP_FLAGS // records.WORD])
        uses = [(word, False, kernel.flag(word)) for word in kernel.reads]
        uses += [(word, True, records.FLAG_PRIVATE_OUTPUT) for word in kernel.writes]
        addresses = {word: word_of(lowered, index, word) for word, *_ in uses}
        offsets = {word: offset_of_head(lowered, index, address) for word, address in addresses.items()}
        yield [
            Access(
                index,
                addresses[word] - offsets[word],
                offsets[word],
                writes,
                (bool(flags & private) and word != kernel.cache) or word in kernel.tables,
                bool(flags & records.FLAG_REPLICATED),
            )
            for word, writes, private in uses
            if addresses[word]  # the step supplies the address of the logits
        ]


def word_of(lowered: Lowered, record: int, word: str) -> int:
    """Return a record's word by name."""
    at = getattr(records.offsets(USES[_key(lowered.kernels[record])].words), word)
    return int(lowered.records[record, at // records.WORD])


def _key(name: KernelName) -> str:
    return name.module if name.function in ("linear", "experts") else name.function


def offset_of_head(lowered: Lowered, record: int, address: int) -> int:
    """Return the byte offset in a buffer at which a per-head product reads or writes; 0 for other records."""
    of_the_same = [number for number, origin in enumerate(lowered.origins) if origin == lowered.origins[record]]
    products = [number for number in of_the_same if lowered.kernels[number].function == "linear"]
    if len(products) == 1 or record not in products:
        return 0
    starts = [address_of(part) for part in lowered.keep if isinstance(part, np.ndarray)]
    return min(address - start for start in starts if start <= address)


def races(lowered: Lowered, *, one_row: bool) -> list[tuple[Access, Access]]:
    """Return pairs of accesses to one buffer, at least one a write, with no barrier between them, unless each thread
    has a private copy."""
    found = []
    since_barrier: list[Access] = []
    flags = lowered.records[:, records.OP_FLAGS // records.WORD].tolist()
    for uses, flag in zip(accesses(lowered), flags, strict=True):
        for use in uses:
            for other in since_barrier:
                if use.address != other.address or not (use.writes or other.writes):
                    continue
                if lie_beside(lowered, use, other):
                    continue
                own_copies = one_row and use.private and other.private
                if not own_copies:
                    found.append((other, use))
        since_barrier += uses
        alone = one_row and flag & records.FLAG_REPLICATED
        if flag & records.FLAG_BARRIER and not alone:
            since_barrier = []
    return [(a, b) for a, b in found if not (one_row and a.replicated and shared_cache(lowered, a))]


def needless_barriers(lowered: Lowered, *, one_row: bool) -> list[str]:
    """Return the kernels whose barrier could be removed without a race. Skips replicated ops in steps of one row."""
    found = []
    column = lowered.records[:, records.OP_FLAGS // records.WORD]
    for index in np.flatnonzero(column & records.FLAG_BARRIER)[:-1].tolist():
        if one_row and column[index] & records.FLAG_REPLICATED:
            continue
        column[index] &= ~records.FLAG_BARRIER
        if not races(lowered, one_row=one_row):
            found.append(str(lowered.kernels[index]))
        column[index] |= records.FLAG_BARRIER
    return found


def lie_beside(lowered: Lowered, a: Access, b: Access) -> bool:
    """Return whether both accesses are outputs of per-head products of one op that do not overlap."""
    same_op = lowered.origins[a.record] == lowered.origins[b.record] and a.record != b.record
    if not same_op or any(lowered.kernels[use.record].function != "linear" for use in (a, b)):
        return False
    n_groups = word_of(lowered, a.record, "groups")
    return a.writes and b.writes and abs(a.offset - b.offset) >= GROUP_BYTES * n_groups


def shared_cache(lowered: Lowered, use: Access) -> bool:
    """Return whether the access is to the KV cache.

    In a step of one row, this is no race: every thread stores the same keys and values and reads its own writes.
    """
    return any(
        word_of(lowered, index, cache) == use.address
        for index, name in enumerate(lowered.kernels)
        if (cache := USES[_key(name)].cache)
    )
