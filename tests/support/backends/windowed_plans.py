"""Give the layers of any model sliding windows when it is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from llmrun.backends.cpu import cache_size
from llmrun.backends.cpu.paged_kv import blocks_in
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape
from llmrun.model.plan.twin import Value


@contextmanager
def windows_in_plans(*windows: int) -> Iterator[None]:
    """Give the layers these windows in turn; 0 means no window."""
    attend = Plan.attention

    def attention(
        self: Plan, q: Value, k: Value, v: Value, shape: AttentionShape, *others: Any, **options: Any
    ) -> Value:
        number = sum(isinstance(op, Attention) for op in self.ops)
        return attend(self, q, k, v, replace(shape, window=windows[number % len(windows)]), *others, **options)

    with mock.patch.object(Plan, "attention", attention):
        yield


@contextmanager
def nothing_given_back() -> Iterator[None]:
    """Give the cache room for all positions, regardless of windows."""
    with mock.patch.object(
        cache_size, "blocks_of_sequence", lambda window, context_size, max_rows: blocks_in(context_size)
    ):
        yield
