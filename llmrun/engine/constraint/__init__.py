"""Constrained output: answers that match a JSON Schema, a regular expression, a grammar or a list of choices.

These modules run in llmrun itself:

limits.py             refuses schemas and grammars that are too large, ambiguous or partly ignored
keywords.py           finds keywords in a schema, and the place of each
strict_json.py        parses JSON without Python's extensions
process.py            sends requests to the isolated process below
validation.py         the final check of a finished answer, and its verdict

These modules run only in the isolated process:

validation_worker.py  answers requests
answer_checks.py      checks an answer with jsonschema
ecma_patterns.py      translates regular expressions from JavaScript's syntax to Python's
formats.py            the formats whose rules no regular expression can state
trial_compile.py      compiles a grammar with llguidance, to see whether it ends
"""
