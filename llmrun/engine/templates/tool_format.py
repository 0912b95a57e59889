"""The results of probing a chat template, above all the format of its tool calls. This module does not import Jinja2.

The texts of a format contain slots: characters that stand for the parts that differ from call to call. Slots are
Unicode noncharacters, which no text contains on purpose. If a template writes a slot, its format is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

NAME = "\ufdd1"  # the tool's name
CALL_ID = "\ufdd2"  # the id of the call
INDEX = "\ufdd3"  # the number of the call in its message
KEY = "\ufdd4"  # the name of an argument
SLOTS = NAME + CALL_ID + INDEX + KEY

JSON_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")


class ValueForm(Struct, frozen=True):
    """The texts around the value of an argument: `prefix` follows the argument's name, and `suffix` the value."""

    prefix: str
    suffix: str


class ArgumentFormat(Struct, frozen=True):
    """The notation for the arguments of a call.

    style       "json" (one JSON object) or "items" (a list of names and values, as described by the fields below)
    separators  the texts after a value and after a key in JSON; None if JSON is written over several lines
    opening     the text before the first item, which is missing if there are no arguments
    closing     the text after the last item, which is missing if there are no arguments
    key_prefix  the text before the name of an argument: "<parameter=", "<arg_key>", ""
    separator   the text between two items
    forms       JSON type -> the texts around a value of this type: (">\\n", "\\n</parameter>\\n"), ("=", "")
    strings     the notation for strings: "raw", "json" or "python"
    scalars     the notation for numbers, booleans and null: "json" or "python"
    arrays      the notation for arrays: "json", "python" or "bare" (JSON without quotes around keys)
    objects     the notation for objects, like `arrays`
    quote       the text around strings inside bare values
    wrapper     the texts around raw strings that contain markup, which may be missing: ("<![CDATA[", "]]>"), or None
    ascii       True if JSON is written with escapes for all characters outside of ASCII
    """

    style: str = "json"
    separators: tuple[str, str] | None = (", ", ": ")
    opening: str = ""
    closing: str = ""
    key_prefix: str = ""
    separator: str = ""
    forms: Mapping[str, ValueForm] = field(default_factory=dict)
    strings: str = "json"
    scalars: str = "json"
    arrays: str = "json"
    objects: str = "json"
    quote: str = '"'
    wrapper: tuple[str, str] | None = None
    ascii: bool = False


class ToolCallFormat(Struct, frozen=True):
    """The texts of a message with tool calls.

    A message consists of `section_start`, calls with `separator` between them, and `section_end`. Each call consists of
    `call_start`, the arguments and `call_end`. The whitespace around the whole message is not part of the format.

    call_start   '<tool_call>\\n{"name": "NAME", "arguments": ', "[TOOL_CALLS]NAME[ARGS]", "<function=NAME>\\n"
    call_end     "}\\n</tool_call>", "", "</function>"
    first_index  the number that INDEX stands for in the first call of a message
    parallel     True if one message may contain several calls
    id_form      the form of ids that the template expects: "any", "short" (nine letters or digits), or a text with
                 slots, such as "functions.NAME:INDEX"
    other_starts texts that models of this family, but not the template, write instead of call_start
    after_plain  the text between an answer and a call: "", "<|close|>response<|sep|>" (Kimi K3)
    """

    call_start: str
    call_end: str
    arguments: ArgumentFormat
    section_start: str = ""
    separator: str = ""
    section_end: str = ""
    first_index: int = 0
    parallel: bool = True
    id_form: str = "any"
    other_starts: tuple[str, ...] = ()
    after_plain: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ToolCallFormat:
        """Rebuild a format from the result of `to_builtins`. Raises KeyError or TypeError."""
        arguments = dict(value["arguments"])
        forms = {name: ValueForm(**form) for name, form in arguments.pop("forms").items()}
        separators, wrapper = arguments.pop("separators"), arguments.pop("wrapper")
        return cls(
            **{
                **value,
                "other_starts": tuple(value["other_starts"]),
                "arguments": ArgumentFormat(
                    **arguments, forms=forms, separators=_pair(separators), wrapper=_pair(wrapper)
                ),
            }
        )

    def id_of(self, name: str, index: str) -> str:
        """Return the id of a call, or "" if the template does not determine it."""
        return self.id_form.replace(NAME, name).replace(INDEX, index) if NAME in self.id_form else ""

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any], str]]) -> str:
        """Return the text of a message with these calls, each a (name, arguments, id), as the template writes it."""
        texts = []
        for number, (name, arguments, call_id) in enumerate(calls, self.first_index):
            call = self.call_start + "\0" + self.call_end
            call = call.replace(NAME, name).replace(CALL_ID, call_id).replace(INDEX, str(number))
            texts.append(call.replace("\0", written_arguments(self.arguments, arguments)))
        return self.section_start + self.separator.join(texts) + self.section_end


def _pair(value: Sequence[str] | None) -> tuple[str, str] | None:
    return (value[0], value[1]) if value else None


def written_arguments(form: ArgumentFormat, arguments: Mapping[str, Any]) -> str:
    """Return the text of arguments as the template writes them."""
    if form.style != "items":
        return json.dumps(arguments, ensure_ascii=form.ascii, separators=form.separators)
    items = [_written_item(form, key, value) for key, value in arguments.items()]
    return form.opening + form.separator.join(items) + form.closing if items else ""


def _written_item(form: ArgumentFormat, key: str, value: Any) -> str:
    around = form.forms[json_type(value)]
    return form.key_prefix + key + around.prefix + written_value(form, value) + around.suffix.replace(KEY, key)


def written_value(form: ArgumentFormat, value: Any) -> str:
    """Return the text of a value as the template writes it, without the texts around the value."""
    if isinstance(value, str):
        if form.strings == "raw":
            return value
        return repr(value) if form.strings == "python" else json.dumps(value, ensure_ascii=False)
    notation = form.arrays if isinstance(value, list) else form.objects if isinstance(value, Mapping) else form.scalars
    if notation == "bare":
        return bare(value, form.quote)
    if notation == "python":
        return repr(value)
    return json.dumps(value, ensure_ascii=form.ascii, separators=form.separators)


def call_objects(calls: Iterable[tuple[str, str, Mapping[str, Any] | str]], *, as_text: bool) -> list[dict[str, Any]]:
    """Return calls, each an (id, name, arguments), in OpenAI's form.

    as_text  True to convert the arguments of all calls to JSON text; arguments that are already text stay the same
    """
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": _as_text(arguments) if as_text else arguments,
            },
        }
        for call_id, name, arguments in calls
    ]


def _as_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def bare(value: Any, quote: str) -> str:
    """Return a value as JSON without spaces and without quotes around keys, but with `quote` around other strings."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{bare(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(item, quote) for item in value) + "]"
    return json.dumps(value)


def json_type(value: Any) -> str:
    """Return the JSON type of a value: one of JSON_TYPES."""
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (Mapping, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


class ThinkingTags(Struct, frozen=True):
    """The tags around thinking and, in some templates, the tags around the answer that follows.

    Tags have no leading or trailing whitespace, but whitespace may surround a tag. A tag may be several tokens long.

    opening         "<think>", "[THINK]", "<|channel|>analysis<|message|>" (gpt-oss), "<|channel>thought" (Gemma 4)
    closing         "</think>", "[/THINK]", "<|end|>", "<channel|>"
    answer_opening  "", "<|START_RESPONSE|>", "<|start|>assistant<|channel|>final<|message|>"
    answer_closing  "", "<|END_RESPONSE|>": the text after the answer, before the token that ends the turn
    """

    opening: str
    closing: str
    answer_opening: str = ""
    answer_closing: str = ""


class ToolAbilities(Struct, frozen=True):
    """The abilities of a template that concern tools.

    takes_tools        True if the prompt shows the tools
    takes_results      True if the prompt shows messages with the role "tool"
    tool_format        the format of calls; None if it is unclear
    shows_calls        True if the prompt shows the calls of past messages
    arguments_as_text  True if past calls must have arguments as JSON text, not as an object
    null_content       True if a message with calls and without text must have the content None, not ""
    """

    takes_tools: bool = False
    takes_results: bool = False
    shows_calls: bool = False
    tool_format: ToolCallFormat | None = None
    arguments_as_text: bool = False
    null_content: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ToolAbilities:
        """Rebuild the abilities from the result of `to_builtins`. Raises KeyError or TypeError."""

        found = value["tool_format"]
        return cls(**{**value, "tool_format": ToolCallFormat.from_json(found) if found else None})


class TemplateAbilities(Struct, frozen=True):
    """The abilities of a template. All fields are empty, None or False if the template rejects every test conversation.

    reasoning_on   variables for `ChatPrompt.template_kwargs` that switch thinking on; may be empty if thinking is on by
                   default
    reasoning_off  variables that switch thinking off; empty if the template has no such variable
    is_off_by_default  True if a prompt without these variables is the same as a prompt with `reasoning_off`
    off_word       the word that switches thinking off at the end of the last user message, such as "/no_think"; "" if
                   no word does, or if the template has variables for this
    thinking_tags  the tags around thinking; None if the template does not reveal the tags
    tools          the abilities that concern tools
    """

    reasoning_on: Mapping[str, object] = field(default_factory=dict)
    reasoning_off: Mapping[str, object] = field(default_factory=dict)
    is_off_by_default: bool = False
    off_word: str = ""
    thinking_tags: ThinkingTags | None = None
    tools: ToolAbilities = ToolAbilities()
