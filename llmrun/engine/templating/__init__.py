"""The room a chat template runs in: a stranger's program, from the model's file, in a world that is closed and metered.

source.py       what is refused before parsing, and Python code from a template
rewriting.py    the syntax tree, so that all that can cost work is a call into this package
environment.py  where those calls arrive: attributes, items, calls, operators, output
budget.py       steps, bytes and time: whoever does work asks here first
values.py       what a template can hold, how large it is, and how it is written out
operators.py, methods.py, text_filters.py, list_filters.py, checks.py, formatting.py, globals.py
                what a template can do with them; nothing else is there

Only this package and sandbox.py import Jinja2.
"""
