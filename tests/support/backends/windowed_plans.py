"""Models whose layers look back a few tokens only, made of any model: its layers get windows as they are planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from llmrun.backends.cpu import backend
from llmrun.backends.cpu.kv_pool import blocks_in
from llmrun.plan.kv_shapes import AttentionShape
from llmrun.plan.ops.attention import Attention
from llmrun.plan.plan import Plan
from llmrun.plan.values import Value


@contextmanager
def windows_in_plans(*windows: int) -> Iterator[None]:
    """Of the layers, in turns; 0: they see everything."""
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
    """The cache has room for all positions, whatever the windows."""
    with mock.patch.object(
        backend, "blocks_of_sequence", lambda window, context_size, max_rows: blocks_in(context_size)
    ):
        yield
