"""Tool calls: parses them from a model's output, enforces them with a grammar, and prepares those of past messages.

prompting.py  prepares prompts with tools, and the decoding and the grammar of their answers
parser.py     finds calls in streamed text, and separates them from the text
calls.py      reads one call, and converts its arguments to JSON
openings.py   the texts that begin a call
reader.py     reads streamed text, waiting for more where necessary
grammar.py    writes the Lark grammar that enforces calls
schemas.py    reads the definitions of tools, and weakens their JSON schemas to what a grammar can enforce
"""
