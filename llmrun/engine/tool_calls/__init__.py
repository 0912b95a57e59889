"""Tool calls: parses them from a model's output, enforces them with a grammar, and prepares those of past messages.

prompting.py   prepares prompts with tools, and the decoding and the grammar of their answers
messages.py    converts past messages with tool calls to the form that a template needs
decoding.py    separates the calls of an answer from its text
grammar.py     writes the Lark grammar that enforces calls
values.py      the part of the grammar for arguments that are not written as JSON
lark.py        literals, regular expressions and rules of a Lark grammar
parser.py      finds calls in streamed text
events.py      what the parser returns
calls.py       reads one call
arguments.py   reads arguments that are not written as JSON, and converts them to JSON
openings.py    the texts that begin a call
calls_json.py  describes calls that are written as one JSON object
reader.py      reads streamed text, waiting for more where necessary
schemas.py     reads the definitions of tools and their JSON schemas
weakened.py    weakens the schemas of tools to what a grammar can enforce
spelling.py    replaces the control tokens in a format with placeholders
"""
