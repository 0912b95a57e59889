"""Forced calls: random tools, a grammar for them, a random text of the grammar, and what the parser makes of it."""

from __future__ import annotations

import json
from random import Random

import jsonschema

from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.schemas import read_tools
from tests.support.tool_calls.answers import parsed
from tests.support.tool_calls.formats import Case
from tests.support.tool_calls.grammars import problem, sampled
from tests.support.tool_calls.random_tools import keys_of, random_tools


def forced_call_problem(case: Case, seed: str) -> str:
    """Force one random answer, and return what is wrong with its calls, or ""."""
    random = Random(f"{case.name} {seed}")
    definitions = random_tools(random)
    tools = read_tools(definitions)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in definitions}
    choice = random.choice(["required", "required", tools[0].name])
    grammar = tool_grammar(case.spelling, tools, choice, parallel=random.random() < 0.7)
    if wrong := problem(case, grammar):
        return f"{wrong}\n{grammar}"
    text = sampled(case, grammar, random, keys_of(definitions))
    found = parsed(case, tools, text, [random.randint(1, 9)])
    where = f"\n{text!r}\n{found}\n{json.dumps(definitions)}"
    if not found.calls or found.broken or found.text:
        return f"not only calls{where}"
    for call in found.calls:
        if not call.ended or call.name not in schemas or choice not in ("required", call.name):
            return f"an unfinished call, or of another tool{where}"
        try:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{error}{where}"
    return ""
