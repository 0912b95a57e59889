"""Schemas, grammars and regular expressions that make llguidance crash, run for minutes or use much memory.

The comments say what llguidance 1.9.1 does with them in its own process, with a stack of 8 MB. Thresholds grow with
the stack.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher


def chain(length: int, link: Any, end: Any) -> str:
    """Return a schema of `$defs` that refer to each other. `link` makes one from the reference to the next."""
    definitions = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**definitions, str(length): end}})


def nested(opening: str, middle: str, closing: str, depth: int) -> str:
    return opening * depth + middle + closing * depth


STRING = {"type": "string"}
KEYS = [f"a{i}" for i in range(20)]
OPTION = {"type": "object", "required": ["k"]}
OPTIONS = [{"$ref": f"#/$defs/{i}"} for i in range(1000)]
SCHEMAS: dict[str, str] = {
    "the smallest int64": '{"const": -9223372036854775808}',  # SIGSEGV: endless recursion
    "a float below int64": '{"type": "integer", "const": -1e19}',  # SIGSEGV
    "3,000 references": chain(3000, lambda to: to, STRING),  # SIGSEGV from 2,400
    "3,000 lists by reference": chain(3000, lambda to: {"type": "array", "items": to}, STRING),  # SIGSEGV from 1,100
    "3,000 allOf by reference": chain(  # SIGSEGV from 1,400
        3000, lambda to: {"type": "object", "properties": {"a": STRING}, "allOf": [to]}, {"type": "object"}
    ),
    "40,000 required keys": json.dumps({"required": [f"p{i}" for i in range(40_000)]}),  # SIGSEGV from 20,000
    "20 patterns at once": json.dumps(  # more than 25 s
        {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i + 5}}}$"} for i in range(20)]}
    ),
    "2,000 key patterns": json.dumps(  # more than 25 s, quadratic: 0.8 s for 200
        {"type": "object", "patternProperties": {f"^k{i}$": {} for i in range(2000)}}
    ),
    "5,000 optional keys": json.dumps(
        {"type": "object", "properties": {f"p{i}": STRING for i in range(5000)}}
    ),  # 2.3 s
    "a large multiple": '{"type": "integer", "multipleOf": 1000003}',  # 6 s and 320 MB
    "an enum of 2 MB": json.dumps({"enum": [f"value{i:07d}" for i in range(130_000)]}),  # 0.6 s
    "properties of 2 MB": json.dumps({"properties": {f"p{i:06d}": STRING for i in range(65_000)}}),
    "properties of 4 MB": json.dumps({"properties": {f"p{i:06d}": STRING for i in range(130_000)}}),
    "a description of 5 MB": json.dumps({"description": "x" * 5_000_000}),
    "doubling allOf": chain(20, lambda to: {"properties": {"a": {"allOf": [to, to]}, "b": {"allOf": [to, to]}}}, {}),
    "a product of anyOf": json.dumps(
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}
    ),
    "1,000 options by reference": json.dumps(
        {"$defs": {str(i): OPTION | {"properties": {"k": {"const": i}}} for i in range(1000)}, "oneOf": OPTIONS}
    ),
    "doubling oneOf": chain(30, lambda to: {"oneOf": [to, to]}, STRING),
    "oneOf of properties that are compared in turn": chain(
        40,
        lambda to: {"type": "object", "required": KEYS, "properties": {key: {"oneOf": [to, to]} for key in KEYS}},
        STRING,
    ),
    "2,000 patterns of 26 keys": json.dumps({"patternProperties": {f"^k{i}[a-z]$": {} for i in range(2000)}}),
    "a reference to itself": '{"$ref": "#"}',
    "a circle of references": chain(2, lambda to: to, {"$ref": "#/$defs/0"}),
    "10,000 levels": nested('{"items": ', "{}", "}", 10_000),
    "10,000 lists": nested("[", "", "]", 10_000),
    "a deep pattern": json.dumps({"pattern": nested("(", "a", ")", 10_000)}),
    "a long pattern": json.dumps({"pattern": "|".join(f"x{i:06d}" for i in range(130_000))}),
    "an unpaired surrogate": '{"const": "\\ud800"}',
    "an infinite bound": '{"minimum": 1e999}',
    "an integer beyond doubles": '{"minimum": 1' + "0" * 400 + "}",
    "a key twice": '{"type": "string", "type": "number"}',
    "compiler options": '{"type": "string", "not": {}, "x-guidance": {"lenient": true}}',
    "a remote reference": '{"$ref": "http://127.0.0.1:1/x"}',
    "a file": '{"$ref": "file:///etc/passwd"}',
}
# Large numbers are harmless: llguidance counts instead of unrolling.
HARMLESS_SCHEMAS: dict[str, str] = {
    "a maximum beyond doubles": '{"maximum": 1' + "0" * 400 + "}",
    "minItems": '{"type": "array", "minItems": 1000000000}',
    "maxItems": '{"type": "array", "maxItems": 1000000000000000000}',
    "minLength": '{"type": "string", "minLength": 1000000000}',
    "maxLength": '{"type": "string", "maxLength": 1000000000}',
    "maxProperties": '{"type": "object", "maxProperties": 1000000000}',
    "a catastrophic pattern": '{"type": "string", "pattern": "^(a+)+$"}',
    "a state explosion": '{"type": "string", "pattern": "(a|b)*a(a|b){2000}$"}',
    "nested repetitions": '{"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100}){1,100}$"}',
    "an enum of 10,000": json.dumps({"enum": [f"value{i}" for i in range(10_000)]}),
    "100 levels of recursion": chain(100, lambda to: {"type": "array", "items": to}, STRING),
    "doubling anyOf": chain(30, lambda to: {"anyOf": [to, to]}, STRING),
}


def _rules(count: int, rule: str, last: str) -> str:
    return "\n".join([*(rule.format(i=i, next=i + 1) for i in range(count)), last.format(i=count)])


GRAMMARS: dict[str, str] = {
    "10,000 rules": "start: r0\n" + _rules(10_000, "r{i}: r{next}", 'r{i}: "a"'),  # SIGSEGV from 2,700
    "10,000 terminals": "start: T0\n" + _rules(10_000, 'T{i}: T{next} | "b"', 'T{i}: "a"'),  # SIGSEGV from 3,500
    "80,000 alternatives": "start: " + " | ".join(f'"x{i:06d}"' for i in range(80_000)),  # quadratic
    "more than 1 MB": 'start: "' + "a" * 2_000_000 + '"',
    "10,000 parentheses": "start: " + nested("(", '"a"', ")", 10_000),
    "10,000 brackets": "start: " + nested("[", '"a"', "]", 10_000),
    "deep JSON": "start: %json " + nested('{"items": ', "{}", "}", 10_000),
    "doubling terminals": "start: T0\n" + _rules(40, "T{i}: T{next} T{next}", 'T{i}: "a"'),
    "doubling rules": "start: r0\n" + _rules(40, "r{i}: r{next} r{next}", 'r{i}: "a"'),
    "only left recursion": 'start: start "a"',
    "nothing but itself": "start: start",
    "a circle of terminals": "start: T\nT: U\nU: T",
    "no start": 'foo: "a"',
    "nothing": " \n",
    "control characters": '\x00\x1b[31m start: "a" %%',
    "an unpaired surrogate": 'start: "\ud800"',
    "lenient JSON": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}',
    "an intersection": "start: A\nA: " + " & ".join(f"/(.|\\n)*{i}(.|\\n){{{i}}}/" for i in range(1, 60)),
    "a million times": 'start: "a"{1000000000}',
}
HARMLESS_GRAMMARS: dict[str, str] = {
    "left recursion": 'start: start "a" | "b"',
    "an ambiguous rule": 'start: e\ne: e e e e | "a" | e | ""',
    "100 rules": "start: r0\n" + _rules(100, "r{i}: r{next}", 'r{i}: "a"'),
    "repeated rules": 'start: r{1000}\nr: s{1000}\ns: "a" | "b" "c"',
    "a special token": 'start: <|im_end|> "a"',
}
REGEXES: dict[str, str] = {
    "4 MB": "a" * 4_000_000,
    "130,000 alternatives": "|".join(f"x{i:06d}" for i in range(130_000)),
    "10,000 parentheses": nested("(", "a", ")", 10_000),
    "an open parenthesis": "(a",
    "lookahead": "(?=a)b",
    "nothing matches": r"[^\s\S]",
    "an unpaired surrogate": "\ud800",
}
HARMLESS_REGEXES: dict[str, str] = {
    "catastrophic": "(a+)+b",
    "a state explosion": "(a|b)*a(a|b){1000}",
    "nested repetitions": "((a{1,1000}){1,1000}){1,1000}",
    "a space": " ",
    "slashes and lines": "a/ \n%ignore /b",
}


# The converter from GBNF is Python and runs in llmrun's process.
GBNF_GRAMMARS: dict[str, str] = {
    "80,000 alternatives": "root ::= " + " | ".join(f'"x{i:06d}"' for i in range(80_000)),
    "10,000 rules": "root ::= r0\n" + _rules(10_000, "r{i} ::= r{next}", 'r{i} ::= "a"'),  # 30 s in the converter
    "1,000 rules": "root ::= r0\n" + _rules(998, "r{i} ::= r{next}", 'r{i} ::= "a"'),
    "10,000 parentheses": "root ::= " + nested("(", '"a"', ")", 10_000),  # RecursionError
    "50,000 open parentheses": "root ::= " + "(" * 50_000,
    "a backslash at the end": 'root ::= "\\',  # IndexError
    "a class that ends in a backslash": "root ::= [\\",  # IndexError
    "an open string": 'root ::= "a',
    "an unknown escape": 'root ::= "\\xZZ"',
    "nothing to repeat": "root ::= *",
    "an endless number": 'root ::= "a"{99999999999999999999}',
    "an unpaired surrogate": 'root ::= "\ud800"',
    "an escaped surrogate": 'root ::= "\\ud800"',
    "control characters": 'root ::= "\x00\x1b" [\x00-\x1b]',
    "only left recursion": 'root ::= root "a"',
    "doubling rules": "root ::= r0\n" + _rules(40, "r{i} ::= r{next} r{next}", 'r{i} ::= "a"'),
    "empty lines": "\n" * 200_000,
    "spaces": " " * 200_000,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "an unpaired surrogate": ("yes", "n\udfff"),
    "80,000 choices": tuple(f"x{i:06d}" for i in range(80_000)),
    "more than 1 MB": ("a" * 2_000_000,),
    "control characters": ("\x00\x1b", "\x7f"),
}


def regex_grammar(regex: str) -> str:
    return str(LLMatcher.grammar_from_regex(regex))
