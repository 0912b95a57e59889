"""Tool calls: parses them from a model's output, enforces them with a grammar, and prepares those of past messages.

prompting.py  prepares prompts with tools, and the decoding and the grammar of their answers
decoding.py   separates the calls of an answer from its text
messages.py   converts past messages with tool calls into the form that a template needs
grammar.py    writes the Lark grammar that enforces calls
values.py     the part of the grammar for arguments that are not written as JSON
weakened.py   weakens the schemas of tools to what a grammar can enforce
schemas.py    reads the JSON schemas of tools
parser.py     finds calls in streamed text
arguments.py  reads the arguments of a call and converts them to JSON
openings.py   the texts that begin a call
reader.py     reads streamed text, waiting for more where necessary
spelling.py   replaces the control tokens in a format with placeholders
"""
