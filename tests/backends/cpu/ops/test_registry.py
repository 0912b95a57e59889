"""Tests of the ops, the CPU engine's op table, and the words in their records."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from llmrun.backends.cpu.ops.registry import cpu_op
from llmrun.formats.layouts.records import OP_ARGS, OP_BYTES, WORD, offsets
from llmrun.model.plan import ops
from llmrun.model.plan.ops.base import Op
from tests.support.kernels.races import USES


def ops_of_plans() -> list[type[Op]]:
    return [one for one in classes_of_ops() if issubclass(one, Op) and not inspect.isabstract(one)]


def classes_of_ops() -> Iterator[Any]:
    for module in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        for value in vars(import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__ == module.name:
                yield value


@pytest.mark.push
def test_the_cpu_engine_runs_every_op() -> None:
    assert all(cpu_op(one).name for one in ops_of_plans())


def test_every_op_says_what_it_computes() -> None:
    assert [
        one.__name__ for one in ops_of_plans() if not one.__doc__ or one.__doc__.startswith(f"{one.__name__}(")
    ] == []


def test_the_words_of_every_record_fit_it() -> None:
    structures = [one for one in classes_of_ops() if one.__name__.endswith("Words")]
    assert {uses.words for uses in USES.values()} == set(structures)
    for words in structures:
        at = [getattr(offsets(words), name) for name in words._fields]
        assert at == list(range(OP_ARGS, OP_ARGS + WORD * len(at), WORD))
        assert at[-1] < OP_BYTES
