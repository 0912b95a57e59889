"""Writes the Lark grammar that enforces correct tool calls. llguidance, the grammar's compiler, is not imported here.

Text that comes from a tool or a template is always escaped or refused. llguidance itself refuses schemas with keywords
that it cannot enforce. The values of arguments that are written one by one are raw text, JSON, Python or bare JSON.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.base.errors import UsageError, shown
from llmrun.engine.constraint.keywords import resolved
from llmrun.engine.templates.tool_format import (
    CALL_ID,
    INDEX,
    KEY,
    NAME,
    ArgumentFormat,
    ValueForm,
    bare,
    json_type,
    written_value,
)
from llmrun.engine.tool_calls.openings import Opening, ToolSpelling, call_starts, openings
from llmrun.engine.tool_calls.schemas import Tool, types

_PLACEHOLDERS = re.compile(r"([\ud800-\udfff])")
_SPECIAL = frozenset("\\/.+*?()|[]{}^$#&-~")


class Rules:
    """The rules of a grammar, with generated names.

    tokens  the token id for each placeholder
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._lines: list[str] = []
        self._known: dict[str, str] = {}
        self._names = 0

    def new_name(self, terminal: bool = False) -> str:
        """Return an unused name. Terminals, which match one piece of text, have uppercase names."""
        self._names += 1
        return f"T{self._names}" if terminal else f"r{self._names}"

    def define(self, name: str, body: str) -> None:
        """Add a rule with the given name."""
        self._lines.append(f"{name}: {body}")

    def rule(self, body: str, options: str = "", *, terminal: bool = False) -> str:
        """Add a rule unless a rule with the same body exists. Returns the rule's name."""
        key = f"{terminal}{options}:{body}"
        if key not in self._known:
            self._known[key] = self.new_name(terminal)
            self.define(self._known[key] + options, body)
        return self._known[key]

    def terminal(self, body: str) -> str:
        """Add a terminal unless a terminal with the same body exists. Returns the terminal's name."""
        return self.rule(body, terminal=True)

    def text(self) -> str:
        """Return the whole grammar."""
        return "%llguidance {}\n" + "\n".join(self._lines) + "\n"

    def literal(self, text: str) -> str:
        """Return an expression for exactly the given text, in which placeholders stand for control tokens, or ""."""
        parts = [part for part in _PLACEHOLDERS.split(text) if part]
        return " ".join(f"<[{self.tokens[part]}]>" if part in self.tokens else string(part) for part in parts)


def string(text: str) -> str:
    """Return a string literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(text: str) -> str:
    """Return a regular expression without slashes that matches exactly the given text."""
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if ord(letter) < 0x20 or ord(letter) == 0x7F:
        return f"\\x{ord(letter):02x}"
    return "\\" + letter if letter in _SPECIAL else letter


def without(*texts: str) -> str:
    """Return the part of a terminal body that excludes the given texts. The part begins with "&" or is empty."""
    return "".join(f" & ~/(?s:.*){regex(text)}(?s:.*)/" for text in texts if text)


def one_of(options: Sequence[str]) -> str:
    """Return the alternation of the given expressions."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def json_matching(value: Any, separators: tuple[str, str] | None, where: str, ascii_only: bool = False) -> str:
    """Return an expression for JSON that matches a schema. `where` names the tool in errors.

    separators  the texts after a value and after a key; None if whitespace is free
    ascii_only  True if strings may contain escapes for any character
    """
    from llmrun.engine.constraint.rewriting import enforceable  # most runs have no tools

    spacing: dict[str, Any] = {"whitespace_flexible": True}
    if separators is not None:
        spacing = {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    if ascii_only:
        spacing["json_allow_general_unicode_escapes"] = True
    try:
        exact = enforceable(value)
        text = json.dumps({**exact, "x-guidance": spacing}, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"schema cannot be written as JSON: {where}: {type(error).__name__}") from error
    return "%json " + text.replace("\x7f", "\\u007f")


_SAFE_KEY = re.compile(r"[\w.$@/-]{1,128}")
_NAME_KEY = re.compile(r"[A-Za-z_]\w{0,127}")
# Raw text that could also be read as a value of another type
_AMBIGUOUS = " & ~/\\s*([-+.(0-9{\\[](?s:.*)|true|false|null|True|False|None)\\s*/"
_INTEGER = "/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = "/-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
_NUMBER_KEYS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_STRING_KEYS = frozenset({"minLength", "maxLength", "pattern"})
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "format", "$comment", "nullable"})
_STRUCTURE = frozenset(
    {"type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions", "properties", "required"}
    | {"additionalProperties", "items", "minItems", "maxItems"}
)
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_MOST = 1_000_000  # maximum number of characters or items; no answer contains more
_DEEPEST = 60
_MOST_VISITS = 5_000


class ItemGrammar:
    """Writes the rules for the arguments of tools."""

    def __init__(self, form: ArgumentFormat, rules: Rules) -> None:
        self._form = form
        self._rules = rules
        self._tool = ""
        self._root: Mapping[str, Any] = {}
        self._references: dict[str, str] = {}
        self._visited = 0  # number of schemas visited for the current tool, including repeated visits

    def arguments(self, tool: str, schema: Mapping[str, Any]) -> str:
        """Return the expression for the arguments of a tool, or "" if the tool takes none. Raises UsageError."""
        self._tool, self._root, self._references, self._visited = tool, schema, {}, 0
        self._check(schema)
        members = self._members(schema)
        items = [self._item(name, value) for name, value, _ in members]
        needed = [need for _, _, need in members]
        literal, form = self._rules.literal, self._form
        listed = self._listed(items, needed, literal(form.separator))
        if not listed:
            return ""
        listed = f"{literal(form.opening)} {listed} {literal(form.closing)}".strip()
        return listed if any(needed) else f"({listed})?"

    def _refuse(self, what: str) -> UsageError:
        return UsageError(
            f"tool cannot be enforced in this model's call format: {self._tool}: {what}",
            hint="simplify the schema of its parameters",
        )

    def _enter(self, depth: int) -> None:
        """Count a visit to a schema. Raises UsageError after too many visits, or if the schema is nested too deeply."""
        self._visited += 1
        if depth > _DEEPEST or self._visited > _MOST_VISITS:
            raise self._refuse("the schema is nested too deeply" if depth > _DEEPEST else "the schema is too large")

    def _check(self, schema: Mapping[str, Any]) -> None:
        """Raise UsageError if the schema contains keywords that the grammar would ignore."""
        known = _STRUCTURE | _NUMBER_KEYS | _STRING_KEYS | _NOTES
        ignored = [str(key) for key, value in schema.items() if key not in known and value not in (False, None)]
        if ignored:
            raise self._refuse(f"{shown(min(ignored), 40)} is not supported")

    # --- objects

    def _members(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Return (name, schema, True if required) for each property of an object."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise self._refuse("properties or required are invalid")
        names = dict.fromkeys([*map(str, properties), *map(str, required)])
        return [(name, properties.get(name, {}), name in required) for name in names]

    def _listed(self, items: Sequence[str], needed: Sequence[bool], between: str) -> str:
        """Return the expression for one or more of the items, in the given order, including all required items."""
        tail = ""
        starts = []
        for at in range(len(items) - 1, -1, -1):
            starts.append(self._rules.rule(f"{items[at]} {tail}".strip()))
            one = f"{between} {items[at]}".strip()
            tail = self._rules.rule(f"{one if needed[at] else f'({one})?'} {tail}".strip())
        starts.reverse()
        first = next((at for at, need in enumerate(needed) if need), len(items) - 1)
        return one_of(starts[: first + 1]) if starts else ""

    def _item(self, key: str, schema: Any) -> str:
        """Return the expression for an argument and its value."""
        self._enter(0)
        form = self._form
        pythonic = form.strings == "python" and not form.key_prefix.strip()
        if not (_NAME_KEY if pythonic else _SAFE_KEY).fullmatch(key):
            raise self._refuse(f"the argument name {shown(key, 60)!r} cannot be written")
        options = []
        wanted = types(schema, self._root)
        around: dict[ValueForm, set[str]] = {}
        for kind in sorted(wanted & form.forms.keys()):
            around.setdefault(form.forms[kind], set()).add(kind)
        for each, kinds in around.items():
            suffix = each.suffix.replace(KEY, key)
            start = self._rules.literal(form.key_prefix + key + each.prefix)
            if "string" in kinds and form.strings == "raw":
                words = self._words(schema, kinds)
                limits = self._limited(schema, frozenset({"string"}))
                options += [f"{start} {text}" for text in self._raw(limits, suffix, words, ambiguous=len(kinds) > 1)]
                kinds = kinds - {"string", "boolean", "null"}
            if kinds:
                value = self._value(self._limited(schema, frozenset(kinds)))
                options.append(f"{start} {value} {self._rules.literal(suffix)}".strip())
        if not options:
            raise self._refuse(f"no value is allowed for {key}")
        return self._rules.rule(one_of(options))

    # --- strings without quotes

    def _words(self, schema: Any, kinds: set[str]) -> list[str]:
        """Return the words for the booleans and null that a schema allows besides strings."""
        found = []
        for kind, values in (("boolean", (True, False)), ("null", (None,))):
            fixed = _fixed(self._limited(schema, frozenset({kind}))) if kind in kinds else []
            allowed = values if fixed is None else fixed
            found += [text for value in allowed for text in (json.dumps(value), repr(value))]
        return found if self._form.scalars == "python" else found[::2]

    def _raw(self, schema: Mapping[str, Any], suffix: str, words: Sequence[str], ambiguous: bool) -> list[str]:
        """Return expressions for the allowed strings and for the words, each followed by the suffix.

        The words and the text share a terminal, because the longest match of any terminal wins.
        """
        end = suffix.strip()
        fixed = _fixed(schema)
        if fixed is not None:
            if any(end in text or _unprintable(text) for text in fixed):
                raise self._refuse("a value contains the text that ends values")
            texts = [*fixed, *words]
            return [f"{self._rules.literal(text)} {self._rules.literal(suffix)}".strip() for text in texts]
        if "anyOf" in schema:
            return [text for each in schema["anyOf"] for text in self._raw(each, suffix, words, ambiguous)]
        plain = self._text(schema) + (_AMBIGUOUS if ambiguous else "")
        wrapper = self._form.wrapper
        if wrapper is None:
            return [self._ended(plain, suffix, words)]
        plain += f" & ~/{regex(wrapper[0])}(?s:.*)/"
        wrapped = self._ended(self._text(schema), wrapper[1] + suffix)
        return [self._ended(plain, suffix, words), f"{self._rules.literal(wrapper[0])} {wrapped}"]

    def _ended(self, body: str, suffix: str, words: Sequence[str] = ()) -> str:
        """Return the expression for text with this terminal body, or for one of the words, including the suffix."""
        stop = re.split(r"[\ud800-\udfff]", suffix.strip())[0]
        body += without(stop)
        text = self._rules.terminal(f"({body}) | /{'|'.join(words)}/" if words else body)
        if not stop:
            return f"{text} {self._rules.literal(suffix)}"
        before, token, after = re.match(r"([^\ud800-\udfff]*)([\ud800-\udfff]?)(.*)", suffix, re.DOTALL).groups()  # type: ignore[union-attr]
        ended = self._rules.rule(text, f"[suffix={string(before)}]")
        return f"{ended} {self._rules.literal(token + after)}".strip()

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Return the terminal body for text that has the length and the pattern of a schema."""
        body = f"/(?s:.{_length(schema)})/"
        pattern = schema.get("pattern")
        if pattern is None:
            return body
        if not isinstance(pattern, str) or re.search(r"\(\?[=!<]|\\[1-9bB]|[\ud800-\udfff\n]", pattern):
            raise self._refuse("a pattern is not supported")
        pattern = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)
        try:
            with warnings.catch_warnings(action="ignore"):  # ignores warnings about nested sets
                re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._refuse("a pattern is not a regular expression") from error
        start = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        return f"{body} & /{start}({inner.removesuffix('$') if not end else inner}){end}/"

    # --- other values

    def _value(self, schema: Mapping[str, Any]) -> str:
        """Return the expression for a value in the format's notation."""
        form = self._form
        options = []
        kinds = types(schema, self._root)
        for some, notation in (({"array"}, form.arrays), ({"object"}, form.objects), (_SCALARS, form.scalars)):
            if not kinds & some:
                continue
            part = self._limited(schema, kinds & some)
            if notation == "json" and not (some == _SCALARS and form.strings == "python"):
                shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
                where = f"the parameters of {self._tool}"
                options.append(json_matching({**shared, **part}, form.separators, where))
            else:
                options.append(self._written(part, 0))
        return one_of(options or [self._nothing()])

    def _written(self, schema: Any, depth: int) -> str:
        """Return the expression for a value in Python or bare notation."""
        self._enter(depth)
        if not isinstance(schema, Mapping):
            schema = {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._referenced(reference, schema, depth)
        self._check(schema)
        fixed = _fixed(schema)
        if fixed is not None:
            texts = [self._rules.literal(self._quoted(value)) for value in fixed]
            return one_of(texts) if texts else self._nothing()
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._branches(schema[key], depth)
        wanted = sorted(types(schema, self._root) - ({"integer"} if "number" in types(schema, self._root) else set()))
        return self._rules.rule(one_of([self._typed(kind, schema, depth) for kind in wanted] or [self._nothing()]))

    def _quoted(self, value: Any) -> str:
        return bare(value, self._form.quote) if self._form.arrays == "bare" else repr(value)

    def _nothing(self) -> str:
        raise self._refuse("no value is allowed")

    def _referenced(self, reference: str, schema: Mapping[str, Any], depth: int) -> str:
        if reference not in self._references:
            self._references[reference] = name = self._rules.new_name()
            self._rules.define(name, self._written(resolved(schema, self._root), depth + 1))
        return self._references[reference]

    def _branches(self, branches: Any, depth: int) -> str:
        if not isinstance(branches, list) or not branches:
            raise self._refuse("anyOf or oneOf is invalid")
        return self._rules.rule(one_of([self._written(each, depth + 1) for each in branches]))

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        form = self._form
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            limits = {key: schema[key] for key in _NUMBER_KEYS if key in schema}
            if not limits:
                return self._rules.terminal(_INTEGER if kind == "integer" else _NUMBER)
            return json_matching({"type": kind, **limits}, (",", ":"), f"the parameters of {self._tool}")
        if kind in ("boolean", "null"):
            values: list[Any] = [None] if kind == "null" else [True, False]
            texts = [written_value(form, value) for value in values] + [json.dumps(value) for value in values]
            return one_of([self._rules.literal(text) for text in dict.fromkeys(texts)])
        if kind == "array":
            return self._array(schema, depth)
        return self._mapping(schema, depth)

    def _string(self, schema: Mapping[str, Any]) -> str:
        form = self._form
        if form.arrays == "bare":
            return f"{self._rules.literal(form.quote)} {one_of(self._raw(schema, form.quote, (), ambiguous=False))}"
        if "pattern" in schema:
            raise self._refuse("a pattern is not supported")
        times = _length(schema)
        quotes = [f"/{quote}([^{quote}\\\\\\x00-\\x1f\\x7f]|\\\\[\\\\nrt'\"]){times}{quote}/" for quote in "'\""]
        return one_of([self._rules.terminal(text) for text in quotes])

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = _bounds(schema, "minItems", "maxItems")
        if most == 0:
            return '"[]"'
        item = self._rules.rule(self._written(schema.get("items", self._anything()), depth + 1))
        between = self._comma()
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f'"[" {item} ({between} {item}){more} "]"'
        return self._rules.rule(some if least else f'"[]" | {some}')

    def _mapping(self, schema: Mapping[str, Any], depth: int) -> str:
        members = self._members(schema)
        if not members:
            return '"{}"' if schema.get("additionalProperties") is False else self._free_mapping(schema, depth)
        items = [
            f"{self._rules.literal(self._key(name))} {self._written(value, depth + 1)}" for name, value, _ in members
        ]
        needed = [need for _, _, need in members]
        some = f'"{{" {self._listed(items, needed, self._comma())} "}}"'
        return self._rules.rule(some if any(needed) else f'"{{}}" | {some}')

    def _free_mapping(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return the expression for an object with at most one property, which may have any name."""
        given = schema.get("additionalProperties")
        value = self._written(given if isinstance(given, Mapping) else self._anything(), depth + 1)
        name = self._rules.terminal("/[A-Za-z_][A-Za-z0-9_]{0,30}/")
        mark = "" if self._form.arrays == "bare" else '"\'"'
        colon = '":"' if self._form.arrays == "bare" else '": "'
        return self._rules.rule(f'"{{}}" | "{{" {mark} {name} {mark} {colon} {value} "}}"')

    def _key(self, name: str) -> str:
        if self._form.arrays != "bare":
            return f"{name!r}: "
        if not _SAFE_KEY.fullmatch(name):
            raise self._refuse(f"the name {shown(name, 60)!r} cannot be written")
        return f"{name}:"

    def _comma(self) -> str:
        return '","' if self._form.arrays == "bare" else '", "'

    def _anything(self) -> dict[str, Any]:
        """Return a schema for values of unknown type. Only scalars are allowed, so a model can always continue."""
        return {"type": ["string", "number", "boolean", "null"]}

    # --- schemas

    def _limited(self, given: Any, kinds: frozenset[str], depth: int = 0) -> Mapping[str, Any]:
        """Return the part of a schema that allows only values of the given types."""
        found = resolved(given, self._root)
        schema: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {}
        self._enter(depth)
        if types(schema, self._root) <= kinds and "anyOf" not in schema and "oneOf" not in schema:
            return schema
        for key in ("anyOf", "oneOf"):
            branches = schema.pop(key, None)
            if isinstance(branches, list):
                branches = [each for each in branches if types(each, self._root) & kinds]
                fitting = [self._limited(each, kinds, depth + 1) for each in branches]
                if key == "oneOf" and len(fitting) > 1:
                    raise self._refuse("oneOf is not supported; use anyOf")
                schema["anyOf"] = fitting
        fixed = _fixed(schema)
        if fixed is not None:
            schema.pop("const", None)
            schema["enum"] = [value for value in fixed if json_type(value) in kinds]
            schema.pop("type", None)
        else:
            schema["type"] = sorted(kinds & types({"type": schema["type"]} if "type" in schema else {}, {}))
        return schema


def _fixed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows, or None if the schema does not list its values."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return the minimum and the maximum that two keywords set; a maximum of None means no limit."""
    low, high = schema.get(least), schema.get(most)
    low = low if isinstance(low, int) and not isinstance(low, bool) and low > 0 else 0
    high = high if isinstance(high, int) and not isinstance(high, bool) and high >= 0 else None
    return min(low, _MOST), None if high is None else min(high, _MOST)


def _length(schema: Mapping[str, Any]) -> str:
    """Return the quantifier of a regular expression for the length of strings."""
    least, most = _bounds(schema, "minLength", "maxLength")
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


def _unprintable(text: Any) -> bool:
    return not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text)


_ANY = "(?s:.*)"
_SHORT_ID, _LONG_ID = "/[a-zA-Z0-9]{9}/", "/[a-zA-Z0-9_-]{1,40}/"
_INDEX = "/[0-9]{1,3}/"


def tool_grammar(
    spelling: ToolSpelling,
    tools: Sequence[Tool],
    choice: str = "auto",
    *,
    parallel: bool = True,
) -> str:
    """Return the grammar for an answer, starting at the end of the thinking.

    choice    "auto" (text and optional calls), "none" (only text), "required" (only calls, at least
              one) or the name of a tool (exactly one call to it)
    parallel  False to allow at most one call

    Raises UsageError for an unknown tool, and for tools whose arguments cannot be enforced in the format.
    """
    if choice not in ("auto", "none", "required"):
        tools = [tool for tool in tools if tool.name == choice]
        if not tools:
            raise UsageError(
                f"no such tool: {choice[:64]}", hint="name one of the tools, or use auto, none or required"
            )
        parallel = False
    if not tools:
        if choice == "required":
            raise UsageError("a tool call is required, but there are no tools")
        choice = "none"
    grammar = _Grammar(spelling, tools, parallel and spelling.format.parallel)
    write = {"auto": grammar.free, "none": grammar.plain}.get(choice, grammar.forced)
    grammar.rules.define("start", write())
    return grammar.rules.text()


class _Grammar:
    """The grammar of one answer."""

    def __init__(self, spelling: ToolSpelling, tools: Sequence[Tool], parallel: bool) -> None:
        self.rules = Rules(spelling.tokens)
        self._format = spelling.format
        self._tools = tools
        self._parallel = parallel
        self._ends = spelling.ends  # tokens allowed wherever the grammar may end
        self._openings = [each for each in openings(spelling.format) if each.sure]
        self._items = ItemGrammar(spelling.format.arguments, self.rules)
        self._arguments = {tool.name: self.rules.rule(self._of_tool(tool)) for tool in tools}

    # --- whole answers

    def forced(self) -> str:
        """Return the expression for an answer that consists of calls."""
        after = self.rules.literal(self._format.after_plain)
        space = self.rules.terminal("/[ \\n]{1,2}/")
        return f"{space}? {f'({after})? ' if after else ''}{self._section('')} {space}?"

    def plain(self) -> str:
        """Return the expression for an answer without calls."""
        if not self._openings:
            return self._text_without_start()
        tokens, texts = self._triggers()
        return self._text_without(*texts) if texts or not tokens else self._tokens_except(tokens)

    def free(self) -> str:
        """Return the expression for an answer that may contain calls."""
        if not self._openings:
            return f"{self._section('')} | {self._text_without_start()}"
        tokens, texts = self._triggers()
        if not texts:
            text = self._tokens_except(tokens)
            section = self.rules.rule(self._section(""))
            return f"({text} {section})* {text}" if self._parallel else f"{text} ({section} {text})?"
        if tokens:  # a text starts a call only at the beginning of the answer, but a token starts a call anywhere
            section = self.rules.rule(self._section(""))
            return f"{section} | {self._text_without_start()} {section}?"
        calls = []
        for trigger in texts:
            head = self.rules.rule(f"/{_ANY}/ {string(trigger)}", "[lazy]")
            calls.append(f"{head} {self._section(trigger)}")
        call = self.rules.rule(one_of(calls))
        if self._parallel:
            return f"{call}* {self._text()}"
        return f"{self._text_without(*texts)} | {call} {self._text_without(*texts)}"

    def _triggers(self) -> tuple[list[int], list[str]]:
        """Return the tokens and the texts that begin calls."""
        first = [each.text[0] for each in self._openings]
        tokens = sorted({self.rules.tokens[letter] for letter in first if letter in self.rules.tokens})
        texts = [each.text for each in self._openings if each.text[0] not in self.rules.tokens and self._heads(each)]
        return tokens, sorted(dict.fromkeys(texts))

    def _text(self) -> str:
        return self.rules.terminal(f"/{_ANY}/")

    def _tokens_except(self, tokens: Sequence[int]) -> str:
        return self.rules.rule(f"<[^{','.join(map(str, sorted({*tokens, *self._ends})))}]>*")

    def _text_without(self, *texts: str) -> str:
        return self.rules.terminal(f"/{_ANY}/" + without(*(text.strip() for text in texts)))

    def _text_without_start(self) -> str:
        """Return the expression for text that does not begin like a call."""
        first = (self._format.section_start + self._format.call_start).strip()[:1]
        if self._openings:
            texts = "|".join(regex(text) for text in self._triggers()[1])
            return self.rules.terminal(f"/{_ANY}/ & ~/\\s*({texts}){_ANY}/")
        if not first or first == NAME or first in self.rules.tokens:
            return self._text()
        letter = regex(first)
        return self.rules.terminal(f"/[ \\t\\r\\n]*([^ \\t\\r\\n{letter}]{_ANY})?/")

    # --- calls

    def _section(self, trigger: str) -> str:
        """Return the expression for the calls of a message after `trigger`, the text with which the calls begin."""
        form = self._format
        calls = self.rules.rule(one_of([self._call(form.call_start, tool) for tool in self._tools]))
        starts = self._heads(Opening(trigger, True)) if trigger else self._all_heads()
        first = self.rules.rule(one_of([self._call(head, tool) for head in starts for tool in self._tools]))
        more = ""
        if self._parallel:
            more = f" ({self.rules.literal(form.separator)} {calls})*"
        end = self.rules.literal(form.section_end)
        if end:
            end = f" {end}" if form.section_start else f" ({end})?"
        return f"{first}{more}{end}"

    def _all_heads(self) -> list[str]:
        form = self._format
        return [form.section_start + form.call_start, *(form.section_start + start for start in form.other_starts)]

    def _heads(self, opening: Opening) -> list[str]:
        """Return the texts between an opening and the first call's arguments."""
        form = self._format
        heads = self._all_heads()
        if not form.section_start:
            heads += call_starts(form)
        found = [head.lstrip() for head in heads if head.lstrip().startswith(opening.text)]
        return list(dict.fromkeys(head[len(opening.text) :] for head in found))

    def _call(self, head: str, tool: Tool) -> str:
        end = self._format.call_end
        return f"{self._with_slots(head, tool)} {self._arguments[tool.name]} {self._with_slots(end, tool)}".strip()

    def _with_slots(self, text: str, tool: Tool) -> str:
        """Return the expression for a text of the format in a call of the given tool."""
        parts = []
        rest = text.replace(NAME, tool.name)
        while rest:
            at = min((place for slot in (CALL_ID, INDEX) if (place := rest.find(slot)) >= 0), default=len(rest))
            parts.append(self.rules.literal(rest[:at]))
            if at < len(rest):
                short = self._format.id_form == "short"
                ids = _SHORT_ID if short else _LONG_ID
                parts.append(self.rules.terminal(_INDEX if rest[at] == INDEX else ids))
            rest = rest[at + 1 :]
        return " ".join(filter(None, parts))

    def _of_tool(self, tool: Tool) -> str:
        """Return the expression for the arguments of a tool."""
        schema = object_schema(tool)
        form = self._format.arguments
        if form.style == "items":
            return self._items.arguments(tool.name, schema) or '""'
        return json_matching(schema, form.separators, f"the parameters of {tool.name}", form.ascii)


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which allows only declared arguments unless the schema says otherwise.

    Raises UsageError if the arguments are not an object.
    """
    schema = resolved(tool.parameters, tool.parameters)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise UsageError(f"the parameters of the tool {tool.name} are not an object")
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    declares = not schema or "properties" in schema
    closed = {"additionalProperties": False} if declares and "additionalProperties" not in schema else {}
    return {"type": "object", **closed, **shared, **schema}
