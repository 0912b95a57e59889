"""Tests of hostile response formats, from the format to the message that a user sees."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import ConstraintCompiler
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request
from tests.support.constraint.hostile_grammars import CHOICES, GBNF_GRAMMARS, GRAMMARS, REGEXES, SCHEMAS
from tests.support.engine.answers import answer_all
from tests.support.engine.scripted_models import DRAWN, endless, noisy, random_prompt

pytestmark = pytest.mark.push

# About one for the format and two for the start of the next process on a busy, slow machine. Without limits, the worst
# formats take far longer.
CPU_S = 8.0
WALL_S = 20.0  # on a busy machine
FORMATS = {
    **{f"schema: {name}": ResponseFormat(FormatKind.JSON_SCHEMA, text) for name, text in SCHEMAS.items()},
    **{f"grammar: {name}": ResponseFormat(FormatKind.GRAMMAR, text) for name, text in GRAMMARS.items()},
    **{f"GBNF: {name}": ResponseFormat(FormatKind.GRAMMAR, text) for name, text in GBNF_GRAMMARS.items()},
    **{f"regex: {name}": ResponseFormat(FormatKind.REGEX, text) for name, text in REGEXES.items()},
    **{f"choices: {name}": ResponseFormat(FormatKind.CHOICE, choices=texts) for name, texts in CHOICES.items()},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler()
    made.prepare(noisy().tokenizer)
    yield made
    made.close()


def cpu_time() -> float:
    """Return the CPU time of this process and of its children, in seconds."""
    this = psutil.Process()
    own = this.cpu_times()
    ended = own.user + own.system + own.children_user + own.children_system
    return float(ended + sum(times.user + times.system for times in (child.cpu_times() for child in this.children())))


@pytest.mark.night
@pytest.mark.parametrize("name", FORMATS)
def test_a_hostile_format_is_refused_in_one_line(name: str, compiler: ConstraintCompiler) -> None:
    tokenizer = noisy().tokenizer
    cpu, wall = cpu_time(), time.perf_counter()
    with pytest.raises(UsageError) as refused:
        compiler.compile(FORMATS[name], tokenizer)
    assert cpu_time() - cpu < CPU_S
    assert time.perf_counter() - wall < WALL_S
    said = str(refused.value)
    assert said.startswith("response_format: ")
    assert said.isprintable()
    assert len(said) < 450


# Every rule of the first grammar is right-recursive, so the parser keeps items for all of them at each character. In
# the second one, the number of ways to parse a text grows exponentially with its length.
RULES = "\n".join(f'r{i}: "a" r{(i * 7 + 1) % 50} | "a" r{(i * 3 + 2) % 50} | "a"' for i in range(50))
AMBIGUOUS = {"rules": f"start: r0\n{RULES}", "readings": 'start: s\ns: s s s | s s | "a" | "b"'}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_masks_that_become_too_expensive_end_the_answer(name: str) -> None:
    wanted = ResponseFormat(FormatKind.GRAMMAR, AMBIGUOUS[name])
    request = Request(random_prompt(5), 400, sampling=DRAWN, response_format=wanted)
    cpu = cpu_time()
    [gathered] = answer_all(Engine(noisy()), [endless(request)])
    assert cpu_time() - cpu < CPU_S
    said = str(gathered.failed.error)
    assert said.startswith("the response format is too complex to enforce: ")
    assert said.isprintable()
    assert len(said) < 450
    assert set(gathered.text) <= {"a", "b"}
