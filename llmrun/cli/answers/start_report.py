"""Shows with --verbose where the time of a cold start went, from the start of the process to the first token.

docs/troubleshooting.md explains the lines.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from llmrun.base.amounts import format_bandwidth, format_bytes, format_seconds
from llmrun.base.machine.own_process import huge_and_anonymous_bytes, seconds_since_start
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.base.types import LoadTimes, ModelInfo, Timings

_GB: Final = 1e9


def tell_of_start(info: ModelInfo, found: float) -> None:
    """Print how the time until the model was open was spent. Call this function as soon as the engine is open.

    found  the moment of `time.perf_counter` at which the model's file was known
    """
    if info.load_times is not None:
        for line in start_lines(info.load_times, seconds_since_start(), time.perf_counter() - found):
            out.detail(line)


def start_lines(times: LoadTimes, since_start: float | None, since_found: float) -> list[str]:
    """Return the lines for `tell_of_start`. Times are in seconds.

    since_start  the time since the start of the process, or None if unknown
    since_found  the time since the model's file was known
    """
    found = "" if since_start is None else f"file found after {format_seconds(since_start - since_found)}, "
    rest = since_found - times.header_s - times.backend_s
    size = times.packed_bytes
    packing = f"{format_bytes(size)} in {format_seconds(times.packing_s)}"
    if times.packing_s:
        packing += f", {format_bandwidth(size / times.packing_s)}"
    if times.system_s is not None:
        packing += f", system time {format_seconds(times.system_s)}"
    lines = [
        f"start      {found}header {format_seconds(times.header_s)}, imports and the rest {format_seconds(rest)}",
        f"kernels    {format_seconds(times.kernels_s)}",
        f"packing    {packing}; meanwhile, tokenizer {format_seconds(times.tokenizer_s)}",
    ]
    memory = []
    if times.page_faults is not None and size:
        memory.append(f"{times.page_faults / size * _GB:,.0f} page faults per GB of weights")
    if (pages := huge_and_anonymous_bytes()) is not None:
        memory.append(f"{format_bytes(pages[0])} of {format_bytes(pages[1])} in huge pages")
    return [*lines, f"memory     {'; '.join(memory)}"] if memory else lines


def tell_of_first_token(info: ModelInfo, timings: Timings) -> None:
    """Print how long after the start of the process the first token came. Call this function right after the answer."""
    since_start = None if info.load_times is None else seconds_since_start()
    if since_start is not None and timings.generated_tokens:
        first, ttft = since_start - timings.total_s + timings.ttft_s, timings.ttft_s
        out.detail(f"TTFT       {format_seconds(first)} from the start, {format_seconds(ttft)} from the request")
