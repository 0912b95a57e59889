"""Access to the runs of a step, each of which is the rows of one sequence (layouts/states.py)."""

from __future__ import annotations

from typing import Any

from llmrun.formats.layouts import records, states
from llmrun.kernels.code.load_store import load_i32, load_i64
from llmrun.kernels.compiler import inline_function


@inline_function
def n_runs(step: Any) -> Any:
    return load_i64(step + records.STEP_RUNS)


@inline_function
def run_address(step: Any, run: Any) -> Any:
    """Return the address of a run's words."""
    return load_i64(step + records.STEP_RUN_LIST) + run * states.RUN_BYTES


@inline_function
def row_of_run(step: Any, run: Any, index: Any) -> Any:
    """Return the index in the step of the run's row `index`. `run` is the address of the run's words."""
    return load_i32(load_i64(step + records.STEP_RUN_ROWS) + 4 * (load_i64(run + states.RUN_FIRST) + index))
