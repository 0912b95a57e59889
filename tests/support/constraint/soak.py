"""Random answers within real schemas, with the final verdict on each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.limits import compile_probe
from llmrun.engine.constraint.process import ConstraintProcess, Verdict, validate
from tests.support.constraint.corpora import real_schemas
from tests.support.constraint.matchers import checked_schema, matcher, schema_grammar
from tests.support.constraint.random_answers import RandomAnswer

Answerer = Callable[[LLMatcher], RandomAnswer]  # completes one answer; the matcher itself does not change


@dataclass(frozen=True)
class CompiledSchema:
    name: str
    schema: Any
    matcher: LLMatcher


@dataclass(frozen=True)
class Outcome:
    """A finished answer. `verdict` is None if it was cut off or if llguidance gave up, whose message is `error`."""

    schema: str
    answer: RandomAnswer
    verdict: Verdict | None

    @property
    def kind(self) -> str:
        if self.verdict is not None:
            return self.verdict.kind
        return "given up" if self.answer.error else "cut off"


def compiled_schemas(tokenizer: LLTokenizer, prefix: str = "") -> list[CompiledSchema]:
    """Return the real schemas that llguidance supports and whose names begin with a prefix."""
    process = ConstraintProcess()
    found = []
    for name, schema in real_schemas():
        if name.startswith(prefix) and (grammar := _grammar(schema, process)):
            found.append(CompiledSchema(name, schema, matcher(tokenizer, grammar)))
    process.close()
    return found


def outcomes(schemas: Sequence[CompiledSchema], answerer: Answerer, source: random.Random) -> Iterator[Outcome]:
    """Complete answers within randomly chosen schemas without end, and validate those that end by themselves."""
    process = ConstraintProcess()
    while True:
        each = source.choice(schemas)
        answer = answerer(each.matcher)
        verdict = validate(answer.data.decode(), each.schema, process=process) if answer.ended else None
        yield Outcome(each.name, answer, verdict)


def _grammar(schema: Any, process: ConstraintProcess) -> str | None:
    """Return the grammar of a schema, or None if it is refused."""
    try:
        checked = checked_schema(json.dumps(schema))
        grammar = schema_grammar(checked)
    except UsageError:
        return None
    return grammar if compile_probe(grammar, checked, process=process) is None else None
