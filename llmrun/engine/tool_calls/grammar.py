"""Writes the Lark grammar that makes a model call tools correctly. llguidance compiles it; it is not imported here.

Anything that comes from tools is escaped or refused. llguidance itself refuses schemas with keywords it cannot enforce.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.engine.templates.tool_format import CALL_ID, INDEX, NAME
from llmrun.engine.tool_calls import lark
from llmrun.engine.tool_calls.openings import Opening, call_starts, openings
from llmrun.engine.tool_calls.schemas import Tool, resolved
from llmrun.engine.tool_calls.spelling import ToolSpelling
from llmrun.engine.tool_calls.values import ItemGrammar

_ANY = "(?s:.*)"
_SHORT_ID, _LONG_ID = "/[a-zA-Z0-9]{9}/", "/[a-zA-Z0-9_-]{1,40}/"
_INDEX = "/[0-9]{1,3}/"


def tool_grammar(
    spelling: ToolSpelling,
    tools: Sequence[Tool],
    choice: str = "auto",
    *,
    parallel: bool = True,
    ends: Collection[int] = (),
) -> str:
    """Return the grammar for an answer, from the end of thinking on.

    choice    "auto" (text, and calls where the model begins one), "none" (only text), "required" (only calls, at least
              one) or the name of a tool (exactly one call to it)
    parallel  False to allow at most one call
    ends      the tokens that end an answer. The grammar need not contain them: they are allowed wherever it may end.

    Raises UsageError for an unknown tool and for tools that cannot be enforced in this format.
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
    grammar = _Grammar(spelling, tools, parallel and spelling.format.parallel, ends)
    write = {"auto": grammar.free, "none": grammar.plain}.get(choice, grammar.forced)
    grammar.rules.define("start", write())
    return grammar.rules.text()


class _Grammar:
    """The grammar of one answer."""

    def __init__(self, spelling: ToolSpelling, tools: Sequence[Tool], parallel: bool, ends: Collection[int]) -> None:
        self.rules = lark.Rules(spelling.tokens)
        self._format = spelling.format
        self._tools = tools
        self._parallel = parallel
        self._ends = ends
        self._openings = [each for each in openings(spelling.format) if each.sure]
        self._items = ItemGrammar(spelling.format.arguments, self.rules)
        self._arguments = {tool.name: self.rules.rule(self._of_tool(tool)) for tool in tools}

    # --- whole answers

    def forced(self) -> str:
        """Return the expression for an answer that consists of calls."""
        after = self.rules.literal(self._format.after_plain) if not self._format.plain_start else ""
        space = self.rules.terminal("/[ \\n]{1,2}/")
        return f"{space}? {f'({after})? ' if after else ''}{self._section('')} {space}?"

    def plain(self) -> str:
        """Return the expression for an answer without calls."""
        start = self.rules.literal(self._format.plain_start)
        if start:
            return f"{start} {self._text_without(self._format.after_plain)}"
        if not self._openings:
            return self._text_without_start()
        tokens, texts = self._triggers()
        return self._text_without(*texts) if texts or not tokens else self._tokens_except(tokens)

    def free(self) -> str:
        """Return the expression for an answer that may contain calls."""
        form = self._format
        if form.plain_start:
            head = self.rules.rule(f"/{_ANY}/ {lark.string(form.after_plain)}", "[lazy]")
            section = self._section("")
            return f"{self.plain()} | {section} | {self.rules.literal(form.plain_start)} {head} {section}"
        if not self._openings:
            return f"{self._section('')} | {self._text_without_start()}"
        tokens, texts = self._triggers()
        if not texts:
            text = self._tokens_except(tokens)
            section = self.rules.rule(self._section(""))
            return f"({text} {section})* {text}" if self._parallel else f"{text} ({section} {text})?"
        if tokens:  # a call may begin with a text at the beginning of the answer, and with a token anywhere
            section = self.rules.rule(self._section(""))
            return f"{section} | {self._text_without_start()} {section}?"
        calls = []
        for trigger in texts:
            head = self.rules.rule(f"/{_ANY}/ {lark.string(trigger)}", "[lazy]")
            calls.append(f"{head} {self._section(trigger)}")
        call = self.rules.rule(lark.one_of(calls))
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
        return self.rules.terminal(f"/{_ANY}/" + lark.without(*(text.strip() for text in texts)))

    def _text_without_start(self) -> str:
        """Return the expression for text that does not begin like a call."""
        first = (self._format.section_start + self._format.call_start).strip()[:1]
        if self._openings:
            texts = "|".join(lark.regex(text) for text in self._triggers()[1])
            return self.rules.terminal(f"/{_ANY}/ & ~/\\s*({texts}){_ANY}/")
        if not first or first == NAME or first in self.rules.tokens:
            return self._text()
        letter = lark.regex(first)
        return self.rules.terminal(f"/[ \\t\\r\\n]*([^ \\t\\r\\n{letter}]{_ANY})?/")

    # --- calls

    def _section(self, trigger: str) -> str:
        """Return the expression for the calls of a message after the text `trigger`, with which they begin."""
        form = self._format
        calls = self.rules.rule(lark.one_of([self._call(form.call_start, tool) for tool in self._tools]))
        starts = self._heads(Opening(trigger, True)) if trigger else self._all_heads()
        first = self.rules.rule(lark.one_of([self._call(head, tool) for head in starts for tool in self._tools]))
        more = ""
        if self._parallel and self._cut(form.separator) == form.separator:
            more = f" ({self.rules.literal(form.separator)} {calls})*"
        end = self.rules.literal(self._cut(form.section_end))
        if end:
            end = f" {end}" if form.section_start else f" ({end})?"
        return f"{first}{more}{end}"

    def _all_heads(self) -> list[str]:
        form = self._format
        return [form.section_start + form.call_start, *(form.section_start + start for start in form.other_starts)]

    def _heads(self, opening: Opening) -> list[str]:
        """Return what follows the text of an opening in each of the texts before the first call's arguments."""
        form = self._format
        heads = self._all_heads()
        if not form.section_start:
            heads += call_starts(form)
        found = [head.lstrip() for head in heads if head.lstrip().startswith(opening.text)]
        return list(dict.fromkeys(head[len(opening.text) :] for head in found))

    def _call(self, head: str, tool: Tool) -> str:
        end = self._cut(self._format.call_end)
        return f"{self._with_slots(head, tool)} {self._arguments[tool.name]} {self._with_slots(end, tool)}".strip()

    def _with_slots(self, text: str, tool: Tool) -> str:
        """Return the expression for a text of the format in a call of this tool."""
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

    def _cut(self, text: str) -> str:
        """Return a text up to the first token that ends the answer."""
        at = next((at for at, letter in enumerate(text) if self.rules.tokens.get(letter) in self._ends), len(text))
        return text[:at]

    def _of_tool(self, tool: Tool) -> str:
        """Return the expression for the arguments of a tool."""
        schema = object_schema(tool)
        form = self._format.arguments
        if form.style == "items":
            return self._items.arguments(tool.name, schema) or '""'
        return lark.schema(schema, form.separators, f"the parameters of {tool.name}", form.ascii)


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which allows only declared arguments unless it says otherwise.

    Raises UsageError if the arguments are not an object.
    """
    schema = resolved(tool.parameters, tool.parameters)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise UsageError(f"the parameters of the tool {tool.name} are not an object")
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    declares = not schema or "properties" in schema
    closed = {"additionalProperties": False} if declares and "additionalProperties" not in schema else {}
    return {"type": "object", **closed, **shared, **schema}
