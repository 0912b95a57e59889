"""Constrained answers: JSON that matches a schema, or text that matches a regular expression, a grammar or a choice.

These modules run in llmrun itself; parser.py also runs in the isolated process:

base.py           response formats, and the interface of constraints
grammars.py       checks response formats and turns them into grammars for llguidance
exact_formats.py  exact patterns for dates and times
matcher.py        compiles grammars for a vocabulary, and computes the allowed tokens
answer.py         applies a constraint to an answer, from where the answer begins
parser.py         creates llguidance's matchers, with limits for the parser's work
limits.py         refuses schemas and grammars that are too large, ambiguous or partly ignored
keywords.py       finds keywords in a schema, and the place of each
strict_json.py    parses JSON without Python's extensions
process.py        sends requests to the isolated process below
validation.py     the final check of a finished answer, which returns a verdict

These modules run only in the isolated process:

validation_worker.py  answers requests
answer_checks.py      checks an answer with jsonschema
ecma_patterns.py      translates regular expressions from JavaScript's syntax to Python's
formats.py            dates and times, which jsonschema leaves to optional libraries
trial_compile.py      compiles a grammar with llguidance, to see whether that succeeds
"""
