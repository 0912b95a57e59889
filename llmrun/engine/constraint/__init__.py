"""Constrained answers: JSON that matches a schema, or text that matches a regular expression, a grammar or a choice.

These modules run in llmrun itself; parser.py also runs in the isolated process:

base.py         response formats, and the interface of constraints
matcher.py      checks response formats, compiles them for a vocabulary, and computes the allowed tokens
answer.py       applies a constraint to an answer, from where the answer begins
parser.py       creates llguidance's matchers, with limits for the parser's work
limits.py       refuses schemas and grammars that are too large, ambiguous or partly ignored
keywords.py     finds keywords in a schema, and replaces the formats of dates and times with exact patterns
strict_json.py  parses JSON without Python's extensions
process.py      sends requests to the isolated process, and returns the verdict on a finished answer

validation_worker.py runs only in the isolated process. It checks answers with jsonschema, and compiles grammars with
llguidance to see whether that succeeds.
"""
