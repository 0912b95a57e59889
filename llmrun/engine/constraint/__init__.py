"""Constrained answers: JSON that matches a schema, texts that match a regular expression or a grammar.

base.py      response formats, and the interface of constraints
grammars.py  turns response formats into grammars of llguidance
matcher.py   compiles grammars for a vocabulary; the only module that imports llguidance
answer.py    applies a constraint to an answer, from where the answer begins
"""
